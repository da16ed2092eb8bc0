"""Short time slices: who gets them, and who is left alone."""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from time_slices import has_slices_of_threads, slice_of

from edl_hvd.time_slice import ask_for_short_time_slices

needs_slices = pytest.mark.skipif(not has_slices_of_threads(), reason="Linux before 6.12 has one slice for all threads")
SUPPORT = Path(__file__).parents[1] / "support"


def in_a_process(code: str) -> str:
    """What the code prints, in a process whose slices nobody has changed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    words = [sys.executable, "-c", f"from time_slices import *\nimport os, threading\nforget_slice()\n{code}"]
    return subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


ASK = "from edl_hvd.time_slice import ask_for_short_time_slices as ask"


@needs_slices
def test_threads_and_processes_that_are_started_afterwards_have_the_short_slice_and_their_nice_value():
    printed = in_a_process(f"""{ASK}
os.nice(1)
policy, nice, usual_ns = slice_of()
short = (policy, nice, 100_000)
print(usual_ns > 100_000, ask(), slice_of() == short)
thread = threading.Thread(target=lambda: print(slice_of() == short, flush=True))
thread.start()
thread.join()
if os.fork() == 0:
    print(slice_of() == short, flush=True)
    os._exit(0)
os.wait()
""")
    assert printed.splitlines() == ["True True True", "True", "True"]


@needs_slices
def test_a_user_without_privileges_gets_it():
    if os.geteuid() != 0:
        pytest.skip("tries to be another user, for which it has to be root; whoever runs this is none")
    printed = in_a_process(f"{ASK}\nask; slice_of()\nos.setresuid(65534, 65534, 65534)\nprint(ask(), slice_of()[2])")
    assert printed == "True 100000\n"


@needs_slices
def test_who_has_chosen_another_policy_keeps_it():
    printed = in_a_process(
        f"{ASK}\nos.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\nbefore = slice_of()\n"
        "print(ask(), slice_of() == before, before[0] == os.SCHED_BATCH)"
    )
    assert printed == "False True True\n"


@needs_slices
def test_the_other_threads_of_the_process_keep_theirs():
    before, asked = slice_of(), []
    thread = threading.Thread(target=lambda: asked.append((ask_for_short_time_slices(), slice_of()[2])))
    thread.start()
    thread.join(60)
    assert asked == [(True, 100_000)]
    assert slice_of() == before


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_another_system_or_processor_is_left_alone(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert ask_for_short_time_slices() is False
