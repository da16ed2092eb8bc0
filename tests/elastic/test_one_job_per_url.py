"""Two jobs at one checkpoint URL: real processes, one of which is the owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from faults import Outside, pause
from harness import Job
from invariants import check
from test_terminated import step, training
from training import Training

from edl_hvd.checkpoint import restore_newest
from edl_hvd.checkpoint.lease import LeaseHolder, acquire
from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.checkpoint.reading.files import read_listed, verify
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.storage import open_storage


def listed(folder: Path) -> list[int]:
    """Steps of the listed checkpoints; each is verified."""
    storage = open_storage(str(folder / "checkpoints"))
    steps = chosen_steps(storage, None, every=True)
    for number in steps:
        verify(storage, read_listed(storage, number).manifest)
    return steps


def goes_on_until_it_ends(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):
        while True:
            step(process)
    assert process.wait(60) == 1


def test_the_second_job_is_refused_by_name_and_taking_over_ends_the_first(tmp_path):
    with training(tmp_path, EDL_HVD_CHECKPOINT_EVERY="1 step") as first:
        assert first.stdout.readline() == "0\n"
        assert [step(first) for _ in range(3)] == [1, 2, 3]
        with training(tmp_path) as second:
            assert second.wait(120) == 1
            error = second.stderr.read()
        assert f"OwnedError: cannot write checkpoints to file://{tmp_path}/checkpoints" in error
        assert f"the job on host {socket.gethostname()}, process {first.pid}, which has written there since 20" in error
        assert step(first) == 4, "it has lost nothing"
        with training(tmp_path, EDL_HVD_TAKE_OVER="1") as third:
            at = int(third.stdout.readline())
            assert at >= 1
            goes_on_until_it_ends(first)  # it hears of it within seconds, and ends at the next commit
            error = first.stderr.read()
            assert f"was taken over by the job on host {socket.gethostname()}, process {third.pid}" in error
            assert step(third) == at + 1
            assert listed(tmp_path)


def test_a_stopped_job_that_wakes_up_after_it_was_taken_over_harms_nothing(tmp_path):
    every_step = {"EDL_HVD_CHECKPOINT_EVERY": "1 step"}
    with training(tmp_path, **every_step) as first:
        first.stdout.readline()
        for _ in range(5):
            step(first)
        first.send_signal(signal.SIGSTOP)  # perhaps in the middle of a checkpoint
        with training(tmp_path, EDL_HVD_TAKE_OVER="1", **every_step) as second:
            at = int(second.stdout.readline())
            for _ in range(5):
                step(second)
            first.send_signal(signal.SIGCONT)
            goes_on_until_it_ends(first)
            assert step(second) == at + 6
            steps = listed(tmp_path)
        assert steps[0] <= at + 6, "none of the first job's later ones"
        found = restore_newest(open_storage(str(tmp_path / "checkpoints")), lambda event: None)
        assert found.step == steps[0]


def test_a_job_of_several_workers_ends_on_all_of_them_at_once(run_job, tmp_path):
    folder = str(tmp_path / "checkpoints")

    def take_over() -> None:
        acquire(open_storage(folder), LeaseHolder.this_process("another", SYSTEM_CLOCK), SYSTEM_CLOCK, take_over=True)

    script = Training(checkpoint=folder, checkpoint_every="2 steps", epochs=10_000)
    outcome = run_job(Job(faults=(Outside(take_over, step=6),), training=script, launcher="edlrun"))
    assert outcome.exit_code == 1
    assert f"was taken over by the job on host {socket.gethostname()}, process {os.getpid()}" in outcome.output
    assert len(outcome.lines("start")) == 2, "nobody is started again"
    assert outcome.left == []


@pytest.mark.parametrize("answer", ["warn", "stop"])
def test_a_checkpoint_that_cannot_be_written_stops_the_job_where_the_user_says_so(run_job, tmp_path, answer):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way of a folder")

    def unblock() -> None:
        while "checkpoint_failed" not in (tmp_path / "job" / "events.jsonl").read_text():
            time.sleep(0.02)
        (folder / "checkpoints").unlink()

    # One worker's end takes longer than the pause after which the other would be started again.
    faults = (Outside(unblock, step=4),) if answer == "warn" else (pause(10, rank=1, at="leaving"),)
    script = Training(checkpoint=str(folder), checkpoint_every="2 steps", epochs=10_000 if answer == "stop" else 3)
    environment = {"EDL_HVD_ON_CHECKPOINT_FAILURE": answer}
    job = Job(faults=faults, training=script, launcher="edlrun", environment=environment)
    outcome = run_job(job)
    assert any(event["event"] == "checkpoint_failed" for event in outcome.events)
    assert outcome.left == []
    if answer == "warn":
        check(job, outcome)
        assert listed(tmp_path)[0] == outcome.reports[0]["step"]
    else:
        assert outcome.exit_code == 1
        assert "failed, and on_checkpoint_failure is 'stop': cannot" in outcome.output
        assert len(outcome.lines("start")) == 2
