"""Students that resize while teachers die learn the same, bit for bit, as one process with the teacher in it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import Outside, kill, pass_by, remove_host
from fleet import Fleet, Sums, fleet
from harness import Job, Outcome, run
from invariants import check
from teacher_work import PORT, computed_samples, counted_teacher, teacher_work
from training import Training
from waiting import LONG_S, soon

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SHOW = REPOSITORY / "examples" / "imagenet" / "show.py"
pytestmark = pytest.mark.distill

EPOCHS = 10
SAMPLES = 240
NAMES = ("localhost", "127.0.0.1", "127.0.1", "0x7f.1", "0x7f.0.1")
# Different hosts to the job, all of them this one. The worker of 127.1 is killed, and its host not used any more.


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "EDL_HVD_EVENTS": str(folder / "events.jsonl")}  # fmt: skip


def write_hosts(folder: Path, *hosts: str) -> None:
    part = folder / "hosts.part"
    part.write_text("".join(f"{host}\n" for host in hosts))
    part.replace(folder / "hosts")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("trace-*.jsonl")
            for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]  # fmt: skip


def wait_for_step(folder: Path, step: int, size: int, job: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Wait until a world of this size has come to a step; its newest lines."""
    count, deadline_s = -1, 0.0
    while True:
        seen = lines(folder)
        found = [line for line in seen if line.get("size") == size and line["step"] >= step]
        if found:
            return sorted(found, key=lambda line: line["step"])
        if len(seen) > count:  # a bound for a job that stands still, not for one that is slow
            count, deadline_s = len(seen), time.monotonic() + LONG_S
        assert job.poll() is None, (folder / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline_s, (folder / "output.txt").read_text()[-4000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """What one process learns that computes the teacher itself."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "fast").touch()
    words = [sys.executable, str(HERE / "distill_script.py"), str(folder), "7010", str(EPOCHS)]
    subprocess.run(words, check=True, env=environment(folder))
    return (folder / "digest").read_text()


class Churn:
    """Teachers that are killed and started anew, one every half second, while ``is_on``."""

    def __init__(self, teachers: Fleet, count: int) -> None:
        self.teachers, self.count, self.killed = teachers, count, 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        soon(self._thread)

    def _run(self) -> None:
        chance = random.Random(3)
        while not self._is_over.wait(0.5):
            number = chance.randrange(self.count)
            self.teachers.kill(number)
            self.teachers.start(Sums(0.02), number)
            self.killed += 1


def check_samples(folder: Path) -> None:
    """Each sample of each epoch was taken once by the steps that count: the last try of each."""
    tries: dict[int, dict[int, list[int]]] = {}
    for line in lines(folder):
        if "takes" in line:
            tries.setdefault(line["takes"], {}).setdefault(line["generation"], []).extend(line["indices"])
    taken = [sorted(tries[step][max(tries[step])]) for step in sorted(tries)]
    assert len(taken) == EPOCHS * SAMPLES // 16
    per_epoch = SAMPLES // 16
    for epoch in range(EPOCHS):
        seen = [index for step in taken[epoch * per_epoch : (epoch + 1) * per_epoch] for index in step]
        assert sorted(seen) == list(range(SAMPLES)), f"epoch {epoch}"


def test_students_resize_and_die_while_teachers_come_and_go(tmp_path, digest):
    """1, 3, 2, 4, 1 workers; four of them are killed, one teacher is stopped for good, and others are killed."""
    write_hosts(tmp_path, "localhost:1")
    with fleet(tmp_path, *[Sums(0.02)] * 4, token="the-token-of-this-test") as teachers:
        words = [
            str(Path(sys.executable).with_name("edlrun")), "-np", "1", "--min-np", "1", "--max-np", "4",
            "--job-dir", str(tmp_path / "job"), "--discover", f"file:{tmp_path / 'hosts'}", "--teachers",
            teachers.source, "--host-failures", "1",
            sys.executable, str(HERE / "distill_script.py"), str(tmp_path), str(teachers.port), str(EPOCHS),
        ]  # fmt: skip
        with open(tmp_path / "output.txt", "wb") as output:
            variables = {**environment(tmp_path), "EDL_HVD_TEACHERS_TOKEN": teachers.token}
            job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables)
            try:
                with Churn(teachers, 3) as churn:
                    wait_for_step(tmp_path, 3, 1, job)
                    write_hosts(tmp_path, "localhost:1", "127.0.0.1:1", "127.1:1")
                    newest = wait_for_step(tmp_path, 4, 3, job)[-1]
                    teachers.signal(3, signal.SIGSTOP)
                    status = [str(Path(sys.executable).with_name("edl-hvd")), "status", str(tmp_path / "job"), "--json"]
                    shown = json.loads(subprocess.run(status, capture_output=True, check=True).stdout)
                    assert shown["status"]["teachers"]["teachers"] >= 1
                    assert shown["status"]["teachers"]["samples_per_s"] > 0
                    stages = shown["status"]["teachers"]["stages"]
                    assert stages["compute_s"] >= 0.02, "each answer takes that long in the model"
                    assert all(stages[name] > 0 for name in ("read_s", "queued_s", "wire_s", "ready_s", "decode_s"))
                    status[-1] = "--profile"
                    shown = subprocess.run(status, capture_output=True, check=True, text=True).stdout
                    assert "in the teacher's model" in shown
                    line = wait_for_step(tmp_path, newest["step"] + 2, 3, job)[-1]
                    os.kill(worker_of(tmp_path, 3, 2), signal.SIGKILL)
                    wait_for_step(tmp_path, line["step"] + 2, 2, job)
                    write_hosts(tmp_path, *(f"{name}:1" for name in NAMES))
                    line = wait_for_step(tmp_path, 4, 4, job)[-1]
                    wait_for_step(tmp_path, line["step"] + 2, 4, job)
                    write_hosts(tmp_path, "localhost:1")
                    for rank in (1, 2, 3):
                        os.kill(worker_of(tmp_path, 4, rank), signal.SIGKILL)
                    wait_for_step(tmp_path, line["step"] + 4, 1, job)
                assert churn.killed > 3
                (tmp_path / "fast").touch()
                code = soon(job)
            finally:
                if job.poll() is None:
                    job.terminate()
                    soon(job)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text[-4000:]
    assert (tmp_path / "digest").read_text() == digest, "one SHA-256, whatever the fleet and the world were"
    check_samples(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = {event["event"] for event in events}
    assert {"teacher_joined", "teacher_lost", "answers", "resized"} <= kinds


def worker_of(folder: Path, size: int, rank: int) -> int:
    """The process that has this rank in the newest world of this size."""
    found = [line for line in lines(folder) if line.get("size") == size and line["rank"] == rank]
    return max(found, key=lambda line: line["step"])["pid"]


def test_a_source_that_is_not_understood_is_refused_before_the_job_starts(tmp_path):
    words = [str(Path(sys.executable).with_name("edlrun")), "-np", "1", "--teachers", "nowhere:x", "true"]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment(tmp_path))
    assert ended.returncode == 2
    assert "--teachers 'nowhere:x'" in ended.stderr


# --- what resizes cost ---


@dataclass(frozen=True)
class Resized:
    """A job that is over.

    Attributes:
        folder: Its folder.
        job, outcome: What was run, and what came of it.
        computed: Micro-batches that its teachers have computed.
    """

    folder: Path
    job: Job
    outcome: Outcome
    computed: float


@pytest.fixture(scope="module")
def resized(tmp_path_factory) -> Resized:
    """Three workers: two are killed and come back, one is taken away. A teacher is killed, another one comes."""
    folder = tmp_path_factory.mktemp("resized")
    training = Training(samples=240, pause_s=0.05, loader_workers=1, linger_s=0.5, extra=("distill",))
    teachers = Fleet(folder)

    def start(number: int) -> None:
        teachers.start(counted_teacher(folder / f"computed-{number}", 0.02), max_batch=2)

    try:
        for number in range(3):
            start(number)
        faults = (
            kill(rank=1, size=3, step=8), pass_by(size=3, after=0, step=12),
            kill(rank=2, size=3, at="reduced", after=1, visit=3), pass_by(size=3, after=2),
            Outside(lambda: teachers.kill(0), after=3), Outside(lambda: start(3), after=4, delay_s=0.3),
            remove_host("127.1", after=5, delay_s=0.5), pass_by(size=2, after=6),
        )  # fmt: skip
        flags = ("--host-failures", "1000", "--teachers", teachers.source)
        job = Job(hosts=("localhost:1", "127.0.0.1:1", "127.1:1"), faults=faults, training=training, flags=flags,
                  launcher="edlrun", environment={PORT: str(teachers.port)})  # fmt: skip
        outcome = run(job, folder / "job", preloaded=True)
    finally:
        teachers.close()
    return Resized(folder / "job", job, outcome, computed_samples(folder) / 2)


def test_a_resize_throws_a_window_away_at_most_and_a_survivor_asks_no_answer_again(resized):
    """All counts are of micro-batches, so none depends on how fast anything is."""
    outcome = resized.outcome
    check(resized.job, outcome)
    work = teacher_work(outcome.trace)
    assert work.counted == max(line["step"] for line in outcome.lines("end")) * 4, "four micro-batches a step"
    given = sum(line["what"] == "given" for line in outcome.trace)
    assert work.counted <= resized.computed <= given, "what the teachers say themselves"
    assert len(work.shares) >= 8, "most of 3 + 2 + 3 + 2 + 3: one that had not begun to read had asked nothing"
    for share in work.shares:
        assert share.thrown - share.undone <= share.window, share
        assert share.undone <= 4, share
    assert work.asked == work.counted + sum(share.thrown for share in work.shares)
    assert work.stayed > 0
    assert work.answered_again == 0


def test_the_report_of_a_job_shows_its_teachers(resized, tmp_path, monkeypatch):
    """Its workers, all of which tell of each teacher, lost one of three and got a fourth."""
    words = [sys.executable, str(SHOW), str(resized.folder / "events.jsonl"), "--picture", str(tmp_path / "report.png")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(SHOW.parent))  # as if the example had been started
    from teacher_history import teacher_history

    events = resized.outcome.events
    history = teacher_history(events, events[0]["time"])
    assert history is not None
    assert [count for _, count in history.ready] == [0, 1, 2, 3, 2, 3]
    assert len(history.lost) == 1
    assert {look.worker for look in history.looks} == {"localhost:0", "127.0.0.1:0", "127.1:0"}
    assert all(0 <= look.lead <= look.window for look in history.looks)
    row = re.search(r"^ *2 to 3 +4 +1 +[0-9.]+ of [0-9.]+ +[0-9.]+% +[0-9]+ times", done.stdout, flags=re.MULTILINE)
    assert row is not None, done.stdout
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# --- kept answers, and whose they are ---


def learn(folder: Path, teachers: Fleet, epochs: int, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``kept_script.py`` with two workers, of which one is killed on the way if a step is given."""
    words = [
        str(Path(sys.executable).with_name("edlrun")), "-np", "2", "--min-np", "1", "--teachers", teachers.source,
        "--job-dir", str(folder / f"job-{time.monotonic_ns()}"),
        sys.executable, str(HERE / "kept_script.py"), str(folder), str(teachers.port), str(epochs),
    ]  # fmt: skip
    if not kill_at:
        (folder / "fast").touch()
        return subprocess.run(words, capture_output=True, text=True, env=environment(folder))
    with open(folder / "output.txt", "w+") as output:
        job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment(folder))
        try:
            wait_for_step(folder, kill_at, 2, job)
            os.kill(worker_of(folder, 2, 1), signal.SIGKILL)
            (folder / "fast").touch()
            soon(job)
        finally:
            if job.poll() is None:
                job.terminate()
                soon(job)
        return subprocess.CompletedProcess(words, job.returncode, "", (folder / "output.txt").read_text())


def answers_in(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "answers"]


def test_later_jobs_learn_the_same_from_kept_answers_and_another_teacher_is_refused(tmp_path):
    """One worker of the first job is killed, with what it has not written; the third job asks no teacher."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    first, second, third = folders
    with fleet(tmp_path, Sums(0.01, print_as="sums-1"), Sums(0.01, print_as="sums-1")) as teachers:
        done = learn(first, teachers, 4, kill_at=6)
        assert done.returncode == 0, done.stderr[-4000:]
        (first / "kept").rename(second / "kept")
        done = learn(second, teachers, 4)
        assert done.returncode == 0, done.stderr[-4000:]
        kept = sum(event["kept"] for event in answers_in(second))
        assert 3 * 120 < kept < 4 * 120, "what the killed worker had not written is asked for again, and no more"
        (second / "kept").rename(third / "kept")
        done = learn(third, teachers, 4)
        assert done.returncode == 0, done.stderr[-4000:]
    assert sum(event["kept"] for event in answers_in(third)) == 4 * 120
    assert {event["given"] for event in answers_in(third)} == {0}
    assert len({(folder / "digest").read_text() for folder in folders}) == 1
    with fleet(tmp_path, Sums(print_as="sums-2")) as teachers:
        done = learn(first, teachers, 5)
    assert done.returncode == 1
    assert "its model has fingerprint sums-2, the answers here come from sums-1" in done.stderr + done.stdout
