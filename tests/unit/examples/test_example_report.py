"""The demo's report: what an event log proves, and what it must refuse."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from late_module import LateModule

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "imagenet"))  # as if the example had been started

from expected import ExpectedRun, check_run
from report import committed_history, summarize, throughput
from rich.console import Console

from edl_hvd.events import read_events

picture, screen, show = LateModule("picture"), LateModule("screen"), LateModule("show")

A, B = "localhost:0", "127.0.0.1:0"


class Log:
    """Builds the event log of a run of 100 samples per epoch in steps of 25."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.time_s = 1000.0
        self.generation = 0
        self.step = 0

    def add(self, event: str, **fields: Any) -> None:
        self.time_s += 1.0
        self.lines.append({"time": self.time_s, "event": event, **fields})

    def world(self, *members: str) -> None:
        self.generation += 1
        self.add("world_formed", generation=self.generation, size=len(members), members=list(members), step=self.step)
        self.size = len(members)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            epoch = self.step // 4
            self.step += 1
            where = {"step": self.step, "epoch": epoch, "samples": 25 * self.step}
            self.add("commit", generation=self.generation, size=self.size, **where)
            self.add("metrics", values={"loss": 1 / self.step}, **where)
            if self.step % 4 == 0:
                self.validate(epoch, 0.9 + epoch / 100)

    def validate(self, epoch: int, top1: float) -> None:
        values = {"top1": top1, "top5": 1.0}
        self.add("metrics", step=self.step, epoch=epoch, samples=25 * self.step, values=values)

    def resized(self, old: int, new: int, cause: str, seconds: float) -> None:
        sizes = {"old_size": old, "new_size": new}
        self.add("resized", generation=self.generation, cause=cause, downtime_s=seconds, step=self.step, **sizes)


EXPECTED = ExpectedRun(epochs=4, samples_per_epoch=100, sizes=(1, 2, 1, 2, 1), lost=(A,), left=(B,), top1=0.93)


def good_run() -> Log:
    """One host; a second joins; the first dies with a step of its own; it returns; the second leaves."""
    log = Log()
    log.add("job_started", worker=A, pid=1)
    log.world(A)
    log.train(3)
    log.add("job_started", worker=B, pid=2)
    log.world(A, B)
    log.resized(1, 2, "change", 2.5)
    log.train(4)
    log.step -= 1  # A alone made and logged the last commit
    log.world(B)
    log.add("worker_lost", generation=log.generation, worker=A)
    log.resized(2, 1, "failure", 0.25)
    log.train(3)
    log.world(B, A)
    log.resized(1, 2, "change", 2.0)
    log.train(2)
    log.world(A)
    log.resized(2, 1, "change", 0.125)
    log.add("worker_left", generation=log.generation - 1, worker=B, step=log.step)  # a leaver may write late
    log.train(16 - log.step)
    log.add("job_ended", step=log.step, epoch=4, samples=25 * log.step)
    return log


def test_a_run_as_promised_breaks_nothing():
    promises = check_run(summarize(good_run().lines), EXPECTED)
    assert [(promise.what, promise.found) for promise in promises] == [
        ("validation accuracy, top-1: at least 93%", "93.00%"),
        ("samples trained per epoch: 100 in each of 4", "100 in each of 4"),
        ("workers: 1 → 2 → 1 → 2 → 1", "1 → 2 → 1 → 2 → 1"),
        (f"a worker dies: {A}", A),
        (f"a worker leaves: {B}", B),
        ("the job comes to its end", f"{summarize(good_run().lines).duration_s:.0f} s"),
    ]
    assert all(promise.is_kept for promise in promises)


def test_every_resize_is_told_with_who_came_and_went():
    resizes = summarize(good_run().lines).resizes
    assert [(r.old_size, r.new_size, r.cause, r.seconds, picture.describe(r)) for r in resizes] == [
        (1, 2, "change", 2.5, f"{B} joined"),
        (2, 1, "failure", 0.25, f"{A} died"),
        (1, 2, "change", 2.0, f"{A} joined"),
        (2, 1, "change", 0.125, f"{B} left"),
    ]


def test_a_commit_that_died_with_its_only_holder_is_counted_once():
    log = good_run()
    commits = [line for line in log.lines if line["event"] == "commit"]
    assert len(commits) == 17  # 16 steps, one of them made twice
    history = [line["step"] for line in committed_history(log.lines) if line["event"] == "commit"]
    assert history == list(range(1, 17))
    assert summarize(log.lines).samples_per_epoch == dict.fromkeys(range(4), 100)


def test_a_commit_without_new_samples_adds_nothing_to_any_epoch():
    log = Log()
    log.world(A)
    log.train(4)
    log.add("commit", generation=1, size=1, step=4, epoch=1, samples=100)
    log.train(4)
    assert summarize(log.lines).samples_per_epoch == {0: 100, 1: 100}


def test_a_restart_from_a_checkpoint_undoes_what_came_after_it():
    log = Log()
    log.world(A)
    log.train(6)
    log.step = 4
    log.add("restore", url="file:///x", step=4, epoch=1, samples=100, duration_s=0.1)
    log.world(A)
    log.train(4)
    assert summarize(log.lines).samples_per_epoch == {0: 100, 1: 100}


def test_a_validation_made_twice_counts_with_its_last_result():
    log = Log()
    log.world(A)
    log.train(4)
    log.validate(0, 0.5)
    assert [v.top1 for v in summarize(log.lines).validations] == [0.5]


def broken(log: Log, expected: ExpectedRun = EXPECTED) -> list[tuple[str, str]]:
    promises = check_run(summarize(log.lines), expected)
    return [(promise.what, promise.found) for promise in promises if not promise.is_kept]


def drop_one_commit(log: Log) -> None:
    """Steps 6 to 16 start from one step's samples fewer: 25 samples were never trained."""
    for line in log.lines:
        if line["event"] == "commit" and line["step"] > 5:
            line["samples"] -= 25


def repeat_samples(log: Log) -> None:
    for line in log.lines:
        if line["event"] == "commit" and line["step"] > 5:
            line["samples"] += 25


def keep_the_second_host(log: Log) -> None:
    log.lines = [line for line in log.lines if not (line["event"] == "resized" and line["generation"] == 5)]


def lose_another(log: Log) -> None:
    next(line for line in log.lines if line["event"] == "worker_lost")["worker"] = B


def die_instead_of_leaving(log: Log) -> None:
    leaver = next(line for line in log.lines if line["event"] == "worker_left")
    leaver.update(event="worker_lost", generation=5)


def learn_little(log: Log) -> None:
    log.validate(3, 0.5)


def add_an_epoch(log: Log) -> None:
    log.train(4)


@pytest.mark.parametrize(
    ("spoil", "what", "found"),
    [
        (drop_one_commit, "samples trained per epoch: 100 in each of 4", "75 in epoch 2"),
        (repeat_samples, "samples trained per epoch: 100 in each of 4", "125 in epoch 2"),
        (keep_the_second_host, "workers: 1 → 2 → 1 → 2 → 1", "1 → 2 → 1 → 2"),
        (lose_another, f"a worker dies: {A}", B),
        (die_instead_of_leaving, f"a worker leaves: {B}", "none"),
        (learn_little, "validation accuracy, top-1: at least 93%", "50.00%"),
        (add_an_epoch, "samples trained per epoch: 100 in each of 4", "100 in epoch 5"),
    ],
)
def test_a_run_that_breaks_a_promise_is_refused_with_the_reason(spoil, what, found):
    log = good_run()
    spoil(log)
    assert (what, found) in broken(log)


def test_a_run_without_an_end_is_refused():
    log = good_run()
    log.lines.pop()
    assert [what for what, _ in broken(log)] == ["the job comes to its end"]


def test_an_empty_log_is_refused():
    assert len(broken(Log())) == 6


def test_without_a_promised_accuracy_any_will_do():
    log = good_run()
    learn_little(log)
    assert broken(log, replace(EXPECTED, top1=None)) == []


def test_a_stop_shows_in_the_throughput_as_wide_as_it_was():
    samples = [(0.0, 0), (1.0, 100), (2.0, 200), (4.0, 200), (5.0, 300)]
    assert throughput(samples, window_s=1.0) == [(0.5, 100), (1.5, 100), (2.5, 0), (3.5, 0), (4.5, 100)]


def test_the_throughput_adds_up_to_all_samples():
    samples = [(0.0, 0), (0.7, 64), (1.9, 128), (2.2, 200)]
    points = throughput(samples, window_s=0.5)
    widths = [0.5, 0.5, 0.5, 0.5, 0.2]
    total = sum(rate * width for (_, rate), width in zip(points, widths, strict=True))
    assert total == pytest.approx(200)


def test_table_and_picture_show_the_run(tmp_path):
    report = summarize(good_run().lines)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen.resize_table(report))
    text = console.export_text()
    for shown in ("127.0.0.1:0 joined", "localhost:0 died", "0.25", "1 → 2"):
        assert shown in text
    picture.draw(report, tmp_path / "report.png", "a run")
    assert (tmp_path / "report.png").stat().st_size > 10_000


# --- teachers ---


def answers(log: Log, worker: str, seconds: float, waited_s: float, lead: float) -> None:
    log.add(
        "answers", worker=worker, samples=100, seconds=seconds, waited_s=waited_s, teachers=2, lead=0, window=0,
        mean_lead=lead, mean_window=8.0,
    )  # fmt: skip


def run_with_teachers() -> Log:
    """Two workers; one of two teachers is lost and comes back. Each line takes a second."""
    log = Log()
    log.world(A, B)
    for _ in (A, B):  # each worker tells
        log.add("teacher_joined", teacher="t:7010", model="Net", fingerprint="f")
        log.add("teacher_joined", teacher="t:7011", model="Net", fingerprint="f")
    log.train(4)
    for _ in (A, B):
        log.add("teacher_lost", teacher="t:7010", reason="the connection ended", tasks=1)
    log.add("teachers_short", seconds=0.3, reasons="")
    log.add("teacher_joined", teacher="t:7010", model="Net", fingerprint="f")
    answers(log, A, seconds=10.0, waited_s=1.0, lead=6.0)
    answers(log, A, seconds=11.0, waited_s=1.5, lead=2.0)  # of the same pass: half of this second
    answers(log, B, seconds=12.0, waited_s=0.0, lead=7.0)
    log.add("job_ended", step=log.step, epoch=1, samples=25 * log.step)
    return log


def test_teachers_are_counted_once_however_many_workers_tell_of_them():
    history = summarize(run_with_teachers().lines).teachers
    assert history is not None
    assert [count for _, count in history.ready] == [0, 1, 2, 1, 2]
    assert [address for _, address in history.joined] == ["t:7010", "t:7011", "t:7010"]
    assert [(address, reason) for _, address, reason in history.lost] == [("t:7010", "the connection ended")]
    assert history.shortages == 1


def test_the_share_of_time_waited_is_that_of_each_while():
    history = summarize(run_with_teachers().lines).teachers
    assert history is not None
    assert [(look.worker, look.lead, look.waited_share) for look in history.looks] == [
        (A, 6.0, pytest.approx(0.1)), (A, 2.0, pytest.approx(0.5)), (B, 7.0, 0.0)
    ]  # fmt: skip
    assert history.waited_share == pytest.approx(1.5 / 23)
    assert history.lead == (pytest.approx((60 + 2 + 84) / 23), pytest.approx(8.0))


def test_a_log_of_an_earlier_version_names_no_worker_and_no_mean_lead():
    log = run_with_teachers()
    for line in log.lines:
        for name in ("worker", "mean_lead", "mean_window"):
            line.pop(name, None)
    history = summarize(log.lines).teachers
    assert history is not None
    assert {(look.worker, look.lead) for look in history.looks} == {("", 0)}


@pytest.mark.parametrize(("build", "is_taller"), [(good_run, False), (run_with_teachers, True)])
def test_tables_and_picture_show_teachers_only_where_there_are_some(tmp_path, build, is_taller):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in build().lines))
    console = Console(width=100, record=True, file=io.StringIO())
    report = summarize(read_events(path))
    show.show_report(console, report)
    picture.draw(report, tmp_path / "report.png", "a run")
    text = console.export_text()
    assert ("Teachers" in text) == is_taller
    assert ("6.3 of 8.0" in text) == is_taller
    height = int.from_bytes((tmp_path / "report.png").read_bytes()[20:24], "big")
    assert (height > 1500) == is_taller
