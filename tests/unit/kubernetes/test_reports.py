"""What jobs say of their work: asked beside the turns, kept in the status, and what the plan is made from."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from clocks import FakeClock
from waiting import until

from edl_hvd.driver.status import Status, TrainingProgress, report_of
from edl_hvd.errors import UsageError
from edl_hvd.job_report import PATH, JobReport, read_report
from edl_hvd.kubernetes.parsing import read_job
from edl_hvd.kubernetes.reports import EVERY_S, FIRST_EVERY_S, Reports, ask_launcher
from edl_hvd.kubernetes.status import JobState, RunCount, status_of, timings_of
from edl_hvd.status_server import Document, StatusServer
from edl_hvd.timings import Timing

REPORT = JobReport("training", 2, 700, 3110.4, 9100.0, (1, 2, 4), (410.0, 800.0, 1540.0), 7.2e6, 0.4)


# --- asking ---


def test_a_report_arrives_as_it_was_said():
    with StatusServer("0", {PATH: lambda: Document(REPORT.to_json(), "application/json")}) as server:
        port = int(server.url.rsplit(":", 1)[1].strip("/"))
        assert ask_launcher("127.0.0.1", port) == REPORT


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"sizes": [4, 2], "goodput": [1.0, 2.0]}', '{"sizes": [1], "goodput": [-1.0]}',
      "<html>", "[" * 100_000, '{"step": "7"}', '{"sizes": [1]}', '{"goodput": [1e999], "sizes": [1]}',
     '{"left": -5}', '{"change_s": -1.0}', '{"left_s": 1e300}', '{"goodput": [1e300], "sizes": [1]}',
     '{"goodput": [1e-300], "sizes": [1]}', '{"goodput": [1.0], "sizes": [99999999999999999999]}', '{"step": 1e30}',
     '{"step": 99999999999999999999999}', '{"workers": -1}',
     json.dumps({"sizes": list(range(2000)), "goodput": [1.0] * 2000})],
)  # fmt: skip
def test_what_is_no_report_counts_as_nothing_said(text):
    with pytest.raises(UsageError):
        read_report(text)
    with StatusServer("0", {PATH: lambda: Document(text)}) as server:
        assert ask_launcher("127.0.0.1", int(server.url.rsplit(":", 1)[1].strip("/"))) is None


def test_fields_of_a_later_version_are_left_out():
    assert read_report('{"step": 7, "mood": {"good": true}}') == JobReport(step=7)


def test_a_launcher_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask_launcher("127.0.0.1", silent.getsockname()[1]) is None
    assert ask_launcher("127.0.0.1", 1) is None


def test_a_launcher_that_hangs_holds_up_neither_the_turn_nor_others():
    hanging = threading.Event()

    def ask(address: str) -> JobReport | None:
        if address == "hangs":
            hanging.wait(600)
            return None
        return REPORT

    clock = FakeClock()
    reports = Reports(ask, clock)
    launchers = {"one": "hangs", "two": "answers"}
    reports.of(launchers)
    until(lambda: reports.of(launchers) == {"two": REPORT})
    hanging.set()
    reports.close()


def test_each_is_asked_every_ten_seconds_and_sooner_before_it_has_a_curve():
    asked: list[float] = []
    answers = [None, JobReport("starting"), REPORT]
    clock = FakeClock()

    def ask(address: str) -> JobReport | None:
        asked.append(clock.monotonic_s())
        return answers[min(len(asked) - 1, 2)]

    reports = Reports(ask, clock)
    for pause_s in (0.0, FIRST_EVERY_S, FIRST_EVERY_S, EVERY_S, EVERY_S):
        clock.sleep(pause_s)
        count = len(asked)
        reports.of({"one": "a"})
        until(lambda count=count: len(asked) > count and not reports._asking)
        clock.sleep(FIRST_EVERY_S / 2)
        reports.of({"one": "a"})
        clock.sleep(-FIRST_EVERY_S / 2)
    begin_s = asked[0]
    assert [at_s - begin_s for at_s in asked] == [0.0, 2.0, 4.0, 14.0, 24.0]
    assert reports.of({}) == {}
    assert reports.of({"one": "a"}) == {}, "another launcher of the same job has said nothing yet"
    reports.close()


def test_a_job_that_measures_nothing_is_asked_every_ten_seconds_after_a_minute():
    clock, asked = FakeClock(), []
    reports = Reports(lambda address: asked.append(clock.monotonic_s()), clock)
    for _ in range(50):
        reports.of({"one": "a"})
        until(lambda: not reports._asking)
        clock.sleep(FIRST_EVERY_S)
    assert len(asked) == 30 + 4
    reports.close()


# --- what becomes of it ---


def state(status: dict[str, Any] | None = None, report: JobReport | None = REPORT, **more: Any) -> JobState:
    container = {"name": "main", "image": "i", "command": ["python"], "resources": {"requests": {"cpu": "1"}}}
    spec = {"workers": {"min": 1, "max": 4, "template": {"spec": {"containers": [container]}}}}
    meta = {"name": "job", "namespace": "n", "uid": "uid-job", "resourceVersion": "1"}
    job = read_job({"metadata": meta, "spec": spec, "status": status or {}})
    base = JobState(job, (), 1, {}, None, "", None, False, False, RunCount(), True, "", report)
    return replace(base, **more)


def test_the_status_says_how_far_a_job_is_and_what_is_left():
    status = status_of(state(), 1_800_000_000.0)
    assert status["progress"] == {"at": "2027-01-15T08:00:00Z", "step": 700, "samplesPerSecond": 3110,
                                  "estimatedRemainingSeconds": 9100, "left": "2h31m"}  # fmt: skip
    assert status["measured"] == {"sizes": [1, 2, 4], "goodput": [410.0, 800.0, 1540.0], "left": 7.2e6,
                                  "changeSeconds": 0.4}  # fmt: skip


def test_how_long_steps_took_is_kept_of_jobs_that_have_a_family():
    report = replace(REPORT, timings=(Timing(1, 8, 1, 0.1), Timing(2, 8, 1, 0.2)))
    alone = state(report=report)
    assert "timings" not in status_of(alone, 1_800_000_000.0)["measured"]
    assert alone.job.spec is not None
    family = replace(alone, job=replace(alone.job, spec=replace(alone.job.spec, family="text")))
    first = status_of(family, 1_800_000_000.0)
    assert first["measured"]["timings"] == [[1, 8, 1, 0.1, 1, 1], [2, 8, 1, 0.2, 1, 1]]
    assert timings_of(first) == report.timings
    more = replace(report, timings=(*report.timings, Timing(4, 8, 1, 0.3)))
    later = status_of(replace(family, job=replace(family.job, status=first), report=more), 1_800_000_001.0)
    assert len(later["measured"]["timings"]) == 3, "a new one is kept at once"


def test_progress_is_written_twice_a_minute_and_a_new_curve_at_once():
    first = status_of(state(), 1_800_000_000.0)
    later = replace(REPORT, step=800, left=7.1e6)
    assert status_of(state(first, later), 1_800_000_029.0)["progress"] == first["progress"]
    assert status_of(state(first, later), 1_800_000_030.0)["progress"]["step"] == 800
    slower = replace(later, goodput=(410.0, 700.0, 900.0))
    assert status_of(state(first, slower), 1_800_000_001.0)["measured"]["goodput"] == [410.0, 700.0, 900.0]


def test_what_is_not_known_any_more_is_taken_away():
    first = status_of(state(), 1_800_000_000.0)
    later = status_of(state(first, replace(REPORT, left_s=None, left=None, samples_per_s=None)), 1_800_000_100.0)
    assert later["progress"]["left"] is later["progress"]["samplesPerSecond"] is later["measured"]["left"] is None, (
        "the API server merges: what is only left out stays"
    )


def test_a_launcher_that_is_silent_or_starts_anew_takes_nothing_back():
    first = status_of(state(), 1_800_000_000.0)
    for report in (None, JobReport("starting"), JobReport("training", 1, 701)):
        status = status_of(state(first, report), 1_800_000_100.0)
        assert status["measured"] == first["measured"]
    assert status_of(state(first, None, is_complete=True), 1_800_000_100.0)["progress"]["left"] == "0s"


def test_a_job_that_is_restored_says_no_step_before_it_knows_one() -> None:
    assert report_of(Status(at_s=0.0, state="starting")).step == -1
    assert report_of(Status(0.0, "training", progress=TrainingProgress(step=7))).step == 7
