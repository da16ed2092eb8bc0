"""What Horovod's own thread does with the tensors it is handed, while another thread holds Python's lock or forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from edl_hvd.key_value_store import KeyValueStore

HERE = Path(__file__).parent
PATIENCE_S = 30


def start(script: str, rank: int, store: KeyValueStore) -> subprocess.Popen[str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    place = {f"HOROVOD_{name}": str(number) for name, number in zip(names, (rank, 2, rank, 2, 0, 1), strict=True)}
    rendezvous = {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": store.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port),
    }  # fmt: skip
    environment = {**os.environ, **place, **rendezvous, "PYTHONPATH": str(HERE.parent.parent)}
    return subprocess.Popen([sys.executable, str(HERE / script)], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_death_in_the_middle_of_backward_does_not_freeze_the_survivor(store):
    # Horovod's thread, giving up, holds the lock that queueing needs. Did it need Python's lock to let go of a
    # tensor, which the queueing thread holds, then both would wait for ever.
    dying, survivor = start("queueing_script.py", 0, store), start("queueing_script.py", 1, store)
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


def test_no_collective_has_horovods_thread_ask_for_pythons_lock(store):
    # Somebody may fork a data loader's process just then, and Python before 3.11.8 leaves it waiting for ever for a
    # lock that Horovod's thread had (python/cpython#112275).
    ranks = [start("python_lock_script.py", rank, store) for rank in range(2)]
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=4 * PATIENCE_S)
            assert process.returncode == 0
            asked = json.loads(output)
            assert asked.pop("a thread of Python's") > 0
            assert asked == dict.fromkeys(asked, 0)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
