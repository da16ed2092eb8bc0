"""The script of docs/from_horovod.md, started in every way a script may be started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
# Without the flag it takes MPI where Horovod has it.
TWO_WORKERS = [HOROVODRUN, "--gloo", "-np", "2", "--network-interfaces", "lo"]
ELASTIC = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", "printf localhost:1\\\\n127.0.0.1:1\\\\n"]
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root"]
NEEDS_MPI = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no MPI on this machine (apt-get install openmpi-bin)"
)


@pytest.fixture
def script(tmp_path):
    text = (REPOSITORY / "docs" / "from_horovod.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(code)
    return path


def run(command: list[str], script: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_as_a_single_process(script):
    assert "finished on rank 0 of 1" in run([], script)


def test_as_a_single_process_where_horovod_is_not_installed(script, tmp_path):
    (tmp_path / "absent" / "horovod").mkdir(parents=True)
    (tmp_path / "absent" / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('no Horovod here')")
    path = f"{tmp_path / 'absent'}{os.pathsep}{REPOSITORY}"
    assert "finished on rank 0 of 1" in run([], script, PYTHONPATH=path)


@pytest.mark.parametrize("flags", [["-H", "localhost:1,127.0.0.1:1"], ELASTIC], ids=["fixed", "elastic"])
def test_under_horovodrun(script, flags):
    output = run([*TWO_WORKERS, *flags], script)
    assert "finished on rank 0 of 2" in output
    assert "finished on rank 1 of 2" in output


@NEEDS_MPI
@pytest.mark.parametrize(
    "launcher", [[*MPIRUN, "-np", "2"], [HOROVODRUN, "--mpi", "-np", "2"]], ids=["itself", "horovodrun"]
)
def test_under_mpirun(script, launcher):
    # Should Open MPI hang as it starts (open-mpi/ompi#7642), the stacks say so.
    output = run(launcher, script, HOROVOD_ELASTIC_TIMEOUT="90")
    assert "finished on rank 0 of 2" in output
    assert "finished on rank 1 of 2" in output


def run_in_vain(command: list[str], timeout_s: int) -> str:
    """Run what waits for a rank in vain; what it says."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOROVOD_ELASTIC_TIMEOUT": str(timeout_s)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "finished" not in done.stdout
    return done.stderr


@NEEDS_MPI
def test_under_mpirun_a_rank_that_does_not_start_mpi_is_not_waited_for_for_ever(script):
    """MPI_Init has no bound."""
    python = ["-np", "1", sys.executable, str(script)]
    error = run_in_vain([*MPIRUN, *python, ":", "-np", "1", "sleep", "1000"], timeout_s=3)
    assert "Timeout (0:00:03)!" in error
    assert "mpi_rendezvous.py" in error


@NEEDS_MPI
def test_under_mpirun_a_rank_that_does_not_enter_the_elastic_function_is_not_waited_for_for_ever(script):
    late = "import time, edl_hvd; edl_hvd.init(); time.sleep(1000)"
    ranks = ["-np", "1", sys.executable, str(script), ":", "-np", "1", sys.executable, "-c", late]
    # It is the bound of MPI_Init, too, which waits for the slower start.
    error = run_in_vain([*MPIRUN, *ranks], timeout_s=30)
    assert "rank 0 met no complete world of 2 within 30 s; check that every rank enters the @edl_hvd.elastic" in error


def test_the_launcher_starts_a_worker_without_horovod(script, tmp_path):
    (tmp_path / "absent" / "horovod").mkdir(parents=True)
    (tmp_path / "absent" / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('no Horovod here')")
    variables = {
        "PYTHONPATH": f"{tmp_path / 'absent'}{os.pathsep}{REPOSITORY}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "started by horovodrun, but a package it needs cannot be imported here" in done.stderr
    assert "edl-hvd build-horovod" in done.stderr
