"""How a job stands: what its membership and its workers' beats come to, and who is told when."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from edl_hvd.cli.status import _SLOT_STATES, _profile, _rows
from edl_hvd.driver.job import Job
from edl_hvd.driver.membership.events import DrainRequested, End, Exited, Formed, HostsFound, Ready
from edl_hvd.driver.membership.state import LIVE, Membership, Rules, begin
from edl_hvd.driver.membership.transition import transition
from edl_hvd.driver.network import Network
from edl_hvd.driver.reporter import Reporter
from edl_hvd.driver.status import (
    Countdown,
    LastHeartbeat,
    ProcessIdentity,
    Shortage,
    Status,
    Throughput,
    TrainingProgress,
    WorkerStatus,
    describe,
)
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import Beat
from edl_hvd.stage_times import StageTimes
from edl_hvd.teacher_counts import TeacherCounts

BEAT = Beat(1, 7, 5, 80, -1, "compute", 0.1, 3.0, 4, 5, 5, 0.1)


def told(*events: object, rules: Rules | None = None) -> Membership:
    """The membership after these, one second apart."""
    membership = begin(rules or Rules(2, 2, 4, last_call_timeout_s=0.0), 0.0)
    for second, event in enumerate(events):
        membership, _ = transition(membership, event, float(second))  # type: ignore[arg-type]
    return membership


START = (HostsFound((HostSlots("a", 1), HostSlots("b", 1))), Ready("a:0", 1), Ready("b:0", 1))
RUNNING = (*START, Formed("a:0", 1, 1), Formed("b:0", 1, 1))


def seen(membership: Membership, now_s: float) -> Status:
    return describe(membership, now_s, 0.0, TrainingProgress(), {}, {})


def test_every_state_of_a_slot_has_words_and_no_word_is_for_another():
    assert set(_SLOT_STATES) == {*LIVE, "empty", "orphaned"}


def test_before_the_first_world_it_waits_for_workers():
    status = seen(told(*START[:2]), 1.0)
    assert (status.state, status.generation) == ("starting", 0)
    assert status.shortage == Shortage(2, 1, ("1 is starting",), None)
    assert [(one.worker, one.state) for one in status.workers] == [("a:0", "ready"), ("b:0", "starting")]


def test_what_members_get_from_teachers_is_brought_together():
    def heard(worker_counts: TeacherCounts | None) -> LastHeartbeat:
        return LastHeartbeat(replace(BEAT, teachers=worker_counts), 9.5)

    membership = told(*RUNNING)
    both = {"a:0": heard(TeacherCounts(38, 800.0, 11, 12, 0.0)), "b:0": heard(TeacherCounts(37, 712.0, 3, 12, 0.008))}
    status = describe(membership, 10.0, 77.0, TrainingProgress(), both, {})
    assert status.teachers == TeacherCounts(38, 1512.0, 3, 12, 0.004)
    assert dict(_rows(status))["teachers"] == "38 · 1,512 samples/s · lead 3 of 12 · waiting 0.4%"
    assert status.teachers.stages is None
    without = describe(membership, 10.0, 77.0, TrainingProgress(), {"a:0": heard(None)}, {})
    assert without.teachers is None
    assert "teachers" not in dict(_rows(without))


def test_the_profile_is_the_mean_of_the_members_and_sums_up():
    def heard(stages: StageTimes | None) -> LastHeartbeat:
        return LastHeartbeat(replace(BEAT, teachers=TeacherCounts(8, 800.0, 11, 12, 0.0, stages)), 9.5)

    times = StageTimes(0.001, 0.002, 0.003, 0.004, 0.1, 0.49, 0.0005)
    beats = {"a:0": heard(times), "b:0": heard(replace(times, compute_s=0.2, ready_s=0.09))}
    status = describe(told(*RUNNING), 10.0, 77.0, TrainingProgress(), beats, {})
    assert status.teachers is not None
    assert status.teachers.stages == replace(times, compute_s=0.15, ready_s=0.29)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(_profile(status.teachers.stages))
    rows = [line.split() for line in console.export_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["read", "queued", "wire", "waiting", "compute", "ready", "decode", "all"]
    assert [float(row[1]) for row in rows] == [1.0, 2.0, 3.0, 4.0, 150.0, 290.0, 0.5, 450.5]
    assert rows[4][2] == "33.3%"
    starting = describe(told(*RUNNING), 10.0, 77.0, TrainingProgress(), {"a:0": heard(None), "b:0": heard(times)}, {})
    assert starting.teachers is not None
    assert starting.teachers.stages == times


def test_workers_are_shown_with_what_they_said_last():
    heard = {"a:0": LastHeartbeat(replace(BEAT, step=41, phase="input", phase_s=0.25), 9.5)}
    status = describe(
        told(*RUNNING), 10.0, 77.0, TrainingProgress(step=41), heard, {"a:0": ProcessIdentity(123, "mark")}
    )
    assert (status.at_s, status.state, status.generation, status.size) == (77.0, "training", 1, 2)
    one, other = status.workers
    assert (one.worker, one.rank, one.step, one.phase, one.phase_s, one.beat_age_s) == (
        "a:0",
        0,
        41,
        "input",
        0.25,
        0.5,
    )
    assert (one.pid, one.start_token) == (123, "mark")
    assert (other.rank, other.step, other.beat_age_s, other.pid) == (1, None, None, None)


def test_below_min_the_reason_and_the_remaining_time_are_told():
    crash = Exited("b:0", 1, False, "killed by SIGKILL")
    membership = told(*RUNNING, crash, Ready("a:0", 1, 9))
    status = seen(membership, 6.2)
    assert status.state == "waiting"
    assert status.shortage is not None
    assert (status.shortage.needed, status.shortage.ready) == (2, 1)
    fewer = HostsFound((HostSlots("a", 1),))
    status = seen(told(*RUNNING, fewer, crash, Ready("a:0", 1, 9)), 16.0)
    assert status.shortage == Shortage(2, 1, ("discovery lists 1 slot",), 600.0 - 9.0)
    left = (DrainRequested("b", 30.0), Ready("a:0", 1, 9), Ready("b:0", 1, 9), Exited("b:0", 1, True, ""))
    status = seen(told(*RUNNING, *left), 20.0)
    assert status.shortage is not None
    assert status.shortage.reasons == ("b is drained",)
    assert status.drains == (Countdown("b", 15.0),)


def test_a_host_that_is_set_aside_and_a_slot_that_waits_are_told():
    rules = Rules(2, 2, 4, last_call_timeout_s=0.0, host_failures=1)
    crash = Exited("b:0", 1, False, "exit code 1")
    status = seen(told(*RUNNING, crash, Ready("a:0", 1, 9), rules=rules), 10.0)
    assert status.quarantined == (Countdown("b", 55.0),)
    assert status.shortage is not None
    assert status.shortage.reasons == ("host b is quarantined for 55 s",)
    status = seen(told(*RUNNING, crash, Ready("a:0", 1, 9)), 5.5)
    assert status.shortage is not None
    assert "b:0 starts again in 0 s" in status.shortage.reasons or "1 is starting" in status.shortage.reasons


def test_a_job_whose_hosts_are_all_drained_is_stopping_whatever_befell_them_before():
    rules = Rules(2, 1, 4, last_call_timeout_s=0.0, host_failures=1, cooldown_s=0.5)
    crash = Exited("b:0", 1, False, "exit code 1")
    left = (DrainRequested("a", 60.0), DrainRequested("b:0", 60.0))
    assert seen(told(*RUNNING, crash, *left[:1], rules=rules), 7.0).state == "regrouping"
    assert seen(told(*RUNNING, *left), 7.0).state == "stopping"
    assert seen(told(*RUNNING, crash, *left, rules=rules), 8.0).state == "stopping"


def test_a_pace_is_that_of_late_and_falls_when_nothing_moves():
    throughput = Throughput()
    assert throughput.per_s(0.0) is None
    for second in range(100):
        throughput.update(float(second), 1000 + (10 if second < 50 else 30) * second)
    assert throughput.per_s(99.0) == pytest.approx(30)
    assert throughput.per_s(130.0) < 15
    slow = Throughput()
    for minute in range(5):
        slow.update(60.0 * minute, 600 * (minute + 1))
    assert slow.per_s(270.0) == pytest.approx(10), "steps of a minute each"
    slow.update(300.0, 5)  # restored from an older checkpoint
    assert slow.per_s(300.0) is None


class Keeper:
    """What the reporter's status is written to, and a screen that hears nothing."""

    def __init__(self) -> None:
        self.written: list[Status] = []
        self.notes: list[str] = []
        self.broken = False

    def write(self, status: Status) -> None:
        if self.broken:
            raise OSError("disk full")
        self.written.append(status)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Idle:
    """Starts processes that do nothing."""

    async def start(self, worker: str, variables: object) -> object:
        await asyncio.Event().wait()
        raise AssertionError


def test_the_status_is_kept_at_each_change_and_a_full_disk_stops_nothing(tmp_path: Path):
    keeper = Keeper()

    begun = Status(0.0, "starting", progress=TrainingProgress(known_step=7, saved_step=5))

    async def watch() -> None:
        reporter = Reporter(keeper, keeper.write, begun)
        job = Job(Rules(1, 1, 1), Idle(), Network(lambda host: "127.0.0.1"), reporter, known_step=7)  # type: ignore[arg-type]
        reporter.watch(job)
        await job.start()
        stop = False
        running = asyncio.create_task(job.run(end_now=lambda: stop))
        while not keeper.written:
            await asyncio.sleep(0.01)
        assert (keeper.written[0].state, keeper.written[0].progress) == (
            "starting",
            TrainingProgress(known_step=7, saved_step=5),
        )
        keeper.broken = True
        job.handle(HostsFound((HostSlots("a", 1),)))
        while not keeper.notes:
            await asyncio.sleep(0.01)
        keeper.broken = False
        job.handle(Ready("a:0", 1))
        while keeper.written[-1].generation != 1:
            await asyncio.sleep(0.01)
        reporter.beat("a:0", replace(BEAT, step=0, samples=0))
        reporter.beat("a:0", replace(BEAT, step=8, samples=128, saved_step=8))
        stop = True
        for task in list(job._tasks):
            task.cancel()
        await reporter.close(await running)

    asyncio.run(watch())
    assert keeper.notes == ["the job's status cannot be kept: disk full; the job goes on"]
    last = keeper.written[-1]
    assert (last.state, last.end) == ("ended", End(130, "interrupted"))
    assert (last.progress.step, last.progress.samples, last.progress.saved_step) == (8, 128, 8)


def test_a_job_that_could_not_begin_keeps_what_it_knew_of_the_one_before():
    keeper = Keeper()
    orphan = WorkerStatus("a:0", "orphaned", pid=7, start_token="mark")
    begun = Status(0.0, "starting", progress=TrainingProgress(known_step=7), workers=(orphan,))
    asyncio.run(Reporter(keeper, keeper.write, begun).close(End(1, "no hosts")))
    (status,) = keeper.written
    assert (status.state, status.progress.known_step, status.workers) == ("ended", 7, (orphan,))
