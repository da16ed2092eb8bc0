"""A rank dies while another hands its gradients to Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edl_hvd.key_value_store import KeyValueStore

SCRIPT = Path(__file__).with_name("queueing_script.py")
PATIENCE_S = 30


def start(rank: int, store: KeyValueStore) -> subprocess.Popen[str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    place = {f"HOROVOD_{name}": str(number) for name, number in zip(names, (rank, 2, rank, 2, 0, 1), strict=True)}
    rendezvous = {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": store.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port),
    }  # fmt: skip
    environment = {**os.environ, **place, **rendezvous, "PYTHONPATH": str(SCRIPT.parent.parent.parent)}
    return subprocess.Popen([sys.executable, str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_death_in_the_middle_of_backward_does_not_freeze_the_survivor(store):
    # Horovod's thread, giving up, holds the lock that queueing needs. Did it need Python's lock to let go of a
    # tensor, which the queueing thread holds, then both would wait for ever.
    dying, survivor = start(0, store), start(1, store)
    try:
        assert survivor.stdout is not None
        assert survivor.stdout.readline() == "queued\n"
        dying.kill()
        output, _ = survivor.communicate(timeout=PATIENCE_S)
        assert output == "noticed\n"
        assert survivor.returncode == 0
    finally:
        for process in (dying, survivor):
            process.kill()
            process.communicate()
