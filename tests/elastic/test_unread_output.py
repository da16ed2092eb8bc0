"""A job goes on where its output cannot be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import LONG_S, until

HERE = Path(__file__).parent
EDLRUN = str(Path(sys.executable).with_name("edlrun"))
LINES = [f"line {number}" for number in range(100)]


@contextmanager
def started(folder: Path, stdout: Any) -> Iterator[subprocess.Popen[str]]:
    os.mkfifo(folder / "pipe")
    with subprocess.Popen(
        [EDLRUN, "-np", "1", "--output-filename", "output", sys.executable, str(HERE / "unread_script.py"), "pipe"],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)}, cwd=folder, text=True, stdout=stdout,
        stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            job.kill()


def end_of(job: subprocess.Popen[str], folder: Path) -> str:
    """Let the worker print the rest; what edlrun says until it ends well."""
    with open(folder / "pipe", "w"):
        pass
    assert job.stderr is not None
    said = job.stderr.read()
    assert job.wait(LONG_S) == 0, said
    return said


def test_a_job_whose_reader_has_ended_trains_on_and_keeps_its_output(tmp_path: Path) -> None:
    """As ``edlrun ... | head -1`` does."""
    with started(tmp_path, subprocess.PIPE) as job:
        head = subprocess.run(["head", "-1"], stdin=job.stdout, stdout=subprocess.PIPE, text=True, timeout=LONG_S)
        assert job.stdout is not None
        job.stdout.close()
        assert head.stdout == "[0]<stdout>:line 0\n"
        said = end_of(job, tmp_path)
    assert said.count("stdout cannot be written any more: Broken pipe; the job goes on") == 1, said
    assert "Traceback" not in said
    assert (tmp_path / "output" / "worker.localhost.0" / "stdout").read_text().splitlines() == LINES


def test_a_job_trains_on_when_all_that_takes_its_output_is_full(tmp_path: Path) -> None:
    (tmp_path / "output" / "worker.localhost.0").mkdir(parents=True)
    (tmp_path / "output" / "worker.localhost.0" / "stdout").symlink_to("/dev/full")
    with open("/dev/full", "w") as full, started(tmp_path, full) as job:
        said = end_of(job, tmp_path)
    full_disk = "any more: No space left on device; the job goes on"
    assert said.count(f"stdout cannot be written {full_disk}") == 1, said
    assert said.count(f"what workers print is not kept in {tmp_path}/output {full_disk}") == 1, said
    assert "Traceback" not in said


def test_while_its_reader_pauses_a_job_recovers_and_no_line_is_lost(tmp_path: Path) -> None:
    """As ``edlrun ... | less`` does: its user reads the first page. The worker's first life is killed meanwhile."""
    script = """
import os, signal
for number in range(20_000):
    print("line", number)
if not os.path.exists("was here"):
    open("was here", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
import edl_hvd
edl_hvd.init()

@edl_hvd.elastic
def train(state):
    open("came back", "w").close()

train(edl_hvd.State())
"""
    with subprocess.Popen(
        [EDLRUN, "-np", "1", sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            until((tmp_path / "came back").exists, lambda: None if job.poll() is None else "the job has ended")
            assert job.stdout is not None
            printed = job.stdout.read()
        finally:
            job.kill()
        assert job.wait(LONG_S) == 0, printed[-2000:]
    numbers = [int(number) for number in re.findall(r"<stdout>:line (\d+)", printed)]
    assert numbers == [*range(20_000), *range(20_000)]
