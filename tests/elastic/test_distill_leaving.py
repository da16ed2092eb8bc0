"""Workers that wait for an answer leave when they are asked to, with all steps that were made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, Sums, fleet
from test_distill import check_samples, environment, wait_for_step, worker_of, write_hosts
from waiting import LONG_S, soon, until

HERE = Path(__file__).parent
EPOCHS = 10
pytestmark = pytest.mark.distill


@pytest.fixture(scope="module")
def digest_alone(tmp_path_factory) -> str:
    """What one process learns that computes the teacher itself."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "fast").touch()
    words = [sys.executable, str(HERE / "distill_script.py"), str(folder), "7010", str(EPOCHS)]
    subprocess.run(words, check=True, env=environment(folder))
    return (folder / "digest").read_text()


class StudentJob:
    """A job of students whose teacher can be taken away, and given back."""

    def __init__(self, folder: Path, teachers: Fleet) -> None:
        self.folder, self.teachers = folder, teachers

    @property
    def text(self) -> str:
        return (self.folder / "output.txt").read_text()

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        words = [
            str(Path(sys.executable).with_name("edlrun")), "-np", "2", "--min-np", "1", "--job-dir",
            str(self.folder / "job"), "--discover", f"file:{self.folder / 'hosts'}", "--teachers", self.teachers.source,
            *flags, sys.executable, str(HERE / "distill_script.py"), str(self.folder), str(self.teachers.port),
            str(EPOCHS),
        ]  # fmt: skip
        with open(self.folder / "output.txt", "wb") as output:
            # Nobody ends a worker that does not leave, so a test sees that it does not.
            variables = {**environment(self.folder), "EDL_HVD_TERMINATION_GRACE": str(LONG_S)}
            return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables)

    def take_teacher_away(self, job: subprocess.Popen[bytes]) -> int:
        """Kill the only teacher, and wait until both workers are out of answers; the steps that they have made."""
        wait_for_step(self.folder, 3, 2, job)
        short = self.count("teachers_short")  # at the start, while the teacher was connected to
        (self.folder / "fast").touch()
        self.teachers.kill(0)
        self.wait_for("teachers_short", short + 2)
        return max(event["step"] for event in self.events() if event["event"] == "commit")

    def wait_for(self, kind: str, count: int) -> None:
        until(lambda: self.count(kind) >= count, every_s=0.05)

    def count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events())

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in written if line.endswith("\n")]


def end(job: subprocess.Popen[bytes]) -> int:
    """The exit code of a job that has been asked to stop; one that does not stop is ended."""
    try:
        return soon(job, LONG_S / 2)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)  # the second request, which ends it at once
            soon(job)


@pytest.mark.parametrize("loses_one", [False, True], ids=["all", "after_a_death"])
def test_a_job_without_teachers_is_stopped_with_a_checkpoint_and_resumed(tmp_path, digest_alone, loses_one):
    """SIGTERM comes when no teacher is left; in the second case just after a worker was killed."""
    write_hosts(tmp_path, "localhost:1", "127.0.0.1:1")
    with fleet(tmp_path, Sums(0.02)) as teachers:
        students = StudentJob(tmp_path, teachers)
        job = students.start()
        try:
            made = students.take_teacher_away(job)
            if loses_one:
                os.kill(worker_of(tmp_path, 2, 1), signal.SIGKILL)
                write_hosts(tmp_path, "localhost:1")
            job.terminate()
            assert end(job) == 75, students.text[-4000:]
        finally:
            if job.poll() is None:
                job.kill()
                soon(job)
        assert "were killed" not in students.text, students.text[-4000:]
        worlds = sum(event["event"] == "world_formed" for event in students.events())
        teachers.start(Sums(), 0)
        write_hosts(tmp_path, "localhost:1", "127.0.0.1:1")
        job = students.start("--resume")
        try:
            assert soon(job) == 0, students.text[-4000:]
        finally:
            if job.poll() is None:
                job.kill()
                soon(job)
        formed = [event for event in students.events() if event["event"] == "world_formed"]
        assert formed[worlds]["step"] == made, "no step that was made is lost"
    assert (tmp_path / "digest").read_text() == digest_alone
    check_samples(tmp_path)


def test_a_host_is_taken_from_a_job_that_waits_for_teachers(tmp_path, digest_alone):
    """The world changes from two workers to one while neither has an answer."""
    write_hosts(tmp_path, "localhost:1", "127.0.0.1:1")
    with fleet(tmp_path, Sums(0.02)) as teachers:
        students = StudentJob(tmp_path, teachers)
        job = students.start()
        try:
            students.take_teacher_away(job)
            formed = sum(event["event"] == "world_formed" for event in students.events())
            write_hosts(tmp_path, "localhost:1")
            students.wait_for("worker_left", 1)
            students.wait_for("world_formed", formed + 1)
            teachers.start(Sums(), 0)
            assert soon(job) == 0, students.text[-4000:]
        finally:
            if job.poll() is None:
                job.kill()
                soon(job)
    assert (tmp_path / "digest").read_text() == digest_alone
    check_samples(tmp_path)
