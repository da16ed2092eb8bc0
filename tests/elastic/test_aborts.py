"""A member dies while the others connect to it; Gloo's error would end the process that meets it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from edl_hvd.key_value_store import KeyValueStore

SCRIPT = Path(__file__).with_name("aborting_script.py")
PATIENCE_S = 60


def start(rank: int, store: KeyValueStore) -> subprocess.Popen[str]:
    variables = {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_ELASTIC": "1",
        "PYTHONPATH": str(SCRIPT.parent.parent.parent),
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), str(rank), store.address, str(store.port)]
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_member_that_died_after_it_gave_its_address_does_not_take_the_others_along(store):
    """Without the guard the survivor is ended by SIGABRT, and its state with it; now and then Gloo waits instead."""
    dying = start(1, store)
    try:
        while not store.get("/global/1"):
            assert dying.poll() is None
            time.sleep(0.01)
    finally:
        dying.kill()
        dying.communicate()
    survivor = start(0, store)
    try:
        output, errors = survivor.communicate(timeout=PATIENCE_S)
    finally:
        survivor.kill()
    assert (output, survivor.returncode) == ("runs anew\n", 0), errors


def test_after_it_an_abort_ends_the_process_as_ever():
    code = (
        "import ctypes, threading, edl_hvd.worker.engine.abort_guard as guard\n"
        "abort = ctypes.CDLL(None).abort\n"
        "with guard.hold_aborts() as aborted:\n"
        "    pass\n"
        "abort()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -6


def test_a_thread_that_aborts_is_held_and_the_others_go_on():
    code = (
        "import ctypes, os, threading, edl_hvd.worker.engine.abort_guard as guard\n"
        "abort = ctypes.CDLL(None).abort\n"
        "with guard.hold_aborts() as aborted:\n"
        "    threading.Thread(target=abort, daemon=True).start()\n"
        "    aborted.wait()\n"
        "    print('goes on', flush=True)\n"
        "    os.execv('/bin/true', ['true'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.stdout, done.returncode) == ("goes on\n", 0), done.stderr
