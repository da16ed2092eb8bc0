"""SIGTERM to ``python train.py``, as schedulers send it some time before SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edl_hvd.events import read_events

SCRIPT = Path(__file__).with_name("terminated_script.py")


@contextmanager
def training(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), str(folder)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent), **environment}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def step(process: subprocess.Popen[str]) -> int:
    """Let it make the step it waits for; the number of the next."""
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def terminate(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert "saving and leaving at the next commit" in process.stderr.readline()


def saved(folder: Path) -> dict:
    [event] = [event for event in read_events(folder / "events.jsonl") if event["event"] == "emergency_checkpoint"]
    return event


def test_a_terminated_job_saves_its_last_commit_and_goes_on_from_there(tmp_path):
    with training(tmp_path) as process:
        assert process.stdout.readline() == "0\n"
        assert [step(process) for _ in range(4)] == [1, 2, 3, 4]
        terminate(process)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (saved(tmp_path)["step"], saved(tmp_path)["written"]) == (5, True)
    with training(tmp_path) as process:
        assert process.stdout.readline() == "5\n"


def test_a_second_sigterm_ends_it_at_once(tmp_path):
    with training(tmp_path) as process:
        process.stdout.readline()
        terminate(process)
        while process.poll() is None:  # within a second it is the same request
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_what_cannot_be_saved_in_time_is_not_begun_and_the_event_says_why(tmp_path):
    with training(tmp_path, EDL_HVD_CHECKPOINT_EVERY="1 step", EDL_HVD_TERMINATION_GRACE="1ms") as process:
        process.stdout.readline()
        step(process)
        while not any(event["event"] == "checkpoint" for event in read_events(tmp_path / "events.jsonl")):
            step(process)  # only then it is known how long one takes
        terminate(process)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not saved(tmp_path)["written"]
    assert "are left" in saved(tmp_path)["reason"]
