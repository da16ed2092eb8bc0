"""The script of docs/from_horovod.md under ``srun``: Slurm as a cluster of one node, in namespaces of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import namespaces
import pytest
from namespaces import Namespace
from test_launchers import REPOSITORY, script

__all__ = ["script"]  # a fixture

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
NodeName=node NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""
# Half a minute is many times what the daemons take.
CLUSTER = """
set -e
cd "$1"
export SLURM_CONF="$1/slurm.conf"
hostname node
mount --bind hosts /etc/hosts
ip link set lo up
# Slurm asks for addresses of a kind that the host has besides loopback.
ip link add eth0 type veth peer name nowhere
ip address add 10.90.0.1/24 dev eth0
ip link set nowhere up
ip link set eth0 up
munged --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munge.pid" \
    --log-file="$1/munge.log" --seed-file="$1/munge.seed"
slurmctld
slurmd
for i in $(seq 300); do
    if [ "$(sinfo --noheader --format=%t)" = idle ]; then
        echo up
        while :; do sleep 1000 & wait; done
    fi
    sleep 0.1
done
exit 1
"""


def missing() -> str:
    """What this machine lacks; empty if all is there."""
    for program in ("srun", "slurmctld", "slurmd", "munged"):
        if shutil.which(program) is None and shutil.which(program, path="/usr/sbin") is None:
            return f"no Slurm on this machine: no program {program!r} (apt-get install slurm-wlm libpmix2)"
    return namespaces.missing()


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}\n")
    (folder / "hosts").write_text("127.0.0.1 localhost node\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    cluster = Namespace([*namespaces.NAMESPACES, *namespaces.TREE, "sh", "-c", CLUSTER, "sh", str(folder)])
    try:
        yield cluster, {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        cluster.end()


@pytest.mark.parametrize("workers", [1, 2])
def test_under_srun(cluster, script, workers):
    cluster, variables = cluster
    srun = cluster.words("srun", "--mpi=pmix", "-n", str(workers), sys.executable, str(script))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run(srun, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(workers):
        assert f"finished on rank {rank} of {workers}" in done.stdout
