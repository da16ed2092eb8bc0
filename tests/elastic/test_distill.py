"""Students that resize while teachers die learn the same, bit for bit, as one process with the teacher in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleet import Sums, fleet
from waiting import soon

pytestmark = pytest.mark.distill

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
EPOCHS = 10


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "EDL_HVD_EVENTS": str(folder / "events.jsonl")}  # fmt: skip


def write_hosts(folder: Path, *hosts: str) -> None:
    part = folder / "hosts.part"
    part.write_text("".join(f"{host}\n" for host in hosts))
    part.replace(folder / "hosts")


def lines(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for path in folder.glob("trace-*.jsonl")
            for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]  # fmt: skip


def wait_for_step(folder: Path, step: int, size: int, job: subprocess.Popen[bytes]) -> list[dict[str, int]]:
    """Wait until a world of this size has come to a step; its newest lines."""
    deadline_s = time.monotonic() + 200
    while True:
        found = [line for line in lines(folder) if line["step"] >= step and line["size"] == size]
        if found:
            return sorted(found, key=lambda line: line["step"])
        assert job.poll() is None, (folder / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline_s, (folder / "output.txt").read_text()[-4000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """What one process learns that computes the teacher itself."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "fast").touch()
    words = [sys.executable, str(HERE / "distill_script.py"), str(folder), "7010", str(EPOCHS)]
    subprocess.run(words, check=True, env=environment(folder), timeout=300)
    return (folder / "digest").read_text()


def test_students_resize_and_teachers_die_in_mid_epoch(tmp_path, digest):
    """1, 2, 3 workers; two teachers are killed, one is stopped, two are new; the last worker that came is killed."""
    write_hosts(tmp_path, "localhost:1")
    with fleet(tmp_path, Sums(0.02), Sums(0.02), Sums(0.02), token="the-token-of-this-test") as teachers:
        words = [
            str(Path(sys.executable).with_name("edlrun")), "-np", "1", "--min-np", "1", "--max-np", "3",
            "--discover", f"file:{tmp_path / 'hosts'}", "--teachers", teachers.source, "--host-failures", "1",
            sys.executable, str(HERE / "distill_script.py"), str(tmp_path), str(teachers.port), str(EPOCHS),
        ]  # fmt: skip
        with open(tmp_path / "output.txt", "wb") as output:
            variables = {**environment(tmp_path), "EDL_HVD_TEACHERS_TOKEN": teachers.token}
            job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables)
            try:
                wait_for_step(tmp_path, 3, 1, job)
                write_hosts(tmp_path, "localhost:1", "127.0.0.1:1")
                teachers.kill(0)
                line = wait_for_step(tmp_path, 4, 2, job)[-1]
                teachers.start(Sums(0.02))
                teachers.signal(1, signal.SIGSTOP)
                wait_for_step(tmp_path, line["step"] + 4, 2, job)
                write_hosts(tmp_path, "localhost:1", "127.0.0.1:1", "127.1:1")
                line = wait_for_step(tmp_path, 4, 3, job)[-1]
                os.kill(line["pid"], signal.SIGKILL)
                teachers.kill(2)
                teachers.start(Sums(0.02), 0)
                wait_for_step(tmp_path, line["step"] + 3, 2, job)
                (tmp_path / "fast").touch()
                code = soon(job)
            finally:
                if job.poll() is None:
                    job.terminate()
                    soon(job)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text[-4000:]
    assert (tmp_path / "digest").read_text() == digest, "one SHA-256, whatever the fleet and the world were"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = {event["event"] for event in events}
    assert {"teacher_joined", "teacher_lost", "answers", "resized"} <= kinds


def test_a_source_that_is_not_understood_is_refused_before_the_job_starts(tmp_path):
    words = [str(Path(sys.executable).with_name("edlrun")), "-np", "1", "--teachers", "nowhere:x", "true"]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment(tmp_path))
    assert ended.returncode == 2
    assert "--teachers 'nowhere:x'" in ended.stderr
