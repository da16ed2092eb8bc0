"""A member dies, and Gloo's error would end the process of another that meets it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import abort, kill
from harness import TWO_HOSTS, Job
from invariants import check
from job_fixtures import LONG_GLOO_TIMEOUT

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
    """The release of Horovod ends the survivor with SIGABRT, and its state with it; now and then it waits instead."""
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
    assert (output, survivor.returncode) == ("did not form\n", 0), errors


def test_a_survivor_that_aborts_keeps_its_state_and_goes_on(run_either, alone):
    faults = (abort(worker="127.1:0", at="waiting", step=7), kill(worker="127.0.0.1:0", at="waiting", after=0))
    job = Job(hosts=(*TWO_HOSTS, "127.1:1"), faults=faults, flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 2
    assert len(outcome.lines("start")) == 3 + 1


def test_an_abort_in_a_world_that_nobody_leaves_ends_the_worker(run_either, alone):
    job = Job(faults=(abort(worker="127.0.0.1:0", at="waiting", step=7),), flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 1
    assert len(outcome.lines("start")) == 2


GUARDED = """
import ctypes, os, threading, time
from edl_hvd.worker.engine.abort_guard import AbortGuard
from edl_hvd.worker.engine.departures import Departures

library = ctypes.CDLL(None)

def abort_elsewhere():
    "In a thread of which Python knows nothing."
    library.pthread_create(ctypes.byref(ctypes.c_ulong()), None, library.abort, None)

departures = Departures()
guard = AbortGuard(departures, news_s=NEWS_S)
guard.started()
"""
NO_NEWS = "abort_elsewhere(); time.sleep(1000)"
LATE_NEWS = (
    "abort_elsewhere(); time.sleep(0.5); departures.note('a member', regular=False); guard.held.wait()\n"
    "print('goes on', flush=True); os._exit(0)"
)
OLD_NEWS = (
    "departures.note('a member', regular=False); abort_elsewhere(); guard.held.wait()\n"
    "print('goes on', flush=True); os._exit(0)"
)
BROKE = "abort_elsewhere(); guard.broke(); guard.held.wait(); print('goes on', flush=True); os._exit(0)"
ENDED = "departures.note('a member', regular=False); guard.end(); abort_elsewhere(); time.sleep(1000)"
OF_PYTHON = "departures.note('a member', regular=False); threading.Thread(target=library.abort).start()"


def guarded(act: str, news_s: float = PATIENCE_S, *flags: str) -> subprocess.CompletedProcess[str]:
    code = GUARDED.replace("NEWS_S", str(news_s)) + act
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
    )


@pytest.mark.parametrize("act", [LATE_NEWS, OLD_NEWS, BROKE], ids=["late news", "old news", "broke"])
def test_a_thread_that_aborts_when_somebody_has_left_is_held_and_the_others_go_on(act):
    done = guarded(act)
    assert (done.stdout, done.returncode) == ("goes on\n", 0), done.stderr


@pytest.mark.parametrize("act", [NO_NEWS, ENDED, OF_PYTHON], ids=["no news", "after it", "Python's"])
def test_any_other_abort_ends_the_process_as_ever(act):
    done = guarded(act, news_s=0.2)
    assert done.returncode == -6
    assert "Fatal Python error: Aborted" in guarded(act, 0.2, "-X", "faulthandler").stderr
