"""What a driver measures from the heartbeats of rank 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl_hvd.driver.measurements import Measurements, WorkStatus, work_left, work_status
from edl_hvd.planning.values import Curve
from edl_hvd.protocol import Beat
from edl_hvd.timings import Timing
from edl_hvd.work_report import WorkReport

WORK = WorkReport(global_batch=64, micro_batch=8, samples_left=6400)
BEAT = Beat(1, 7, 0, 0, -1, "compute", 0.1, 3.0, 4, 5, 5, 0.1, work=WORK)
EVERY_S = 0.25


class Heartbeats:
    """Feeds the heartbeats of a job whose steps take ``step_s``."""

    def __init__(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self.now_s = 100.0
        self.progress = 1.0
        self.generation = 1

    def train(self, seconds: float, step_s: float, size: int, hosts: int = 1, **changes: Any) -> None:
        for _ in range(round(seconds / EVERY_S)):
            self.now_s += EVERY_S
            self.progress += EVERY_S / step_s
            beat = replace(BEAT, generation=self.generation, step=int(self.progress), **changes)
            self.measurements.update(beat, size, hosts, self.now_s)

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.generation += 1


@pytest.fixture
def beats() -> Heartbeats:
    return Heartbeats(Measurements())


def test_steps_of_each_world_become_a_timing(beats):
    beats.train(30, step_s=0.5, size=1)
    beats.pause(1.0)
    beats.train(30, step_s=0.3, size=2, hosts=2)
    first, second = beats.measurements.timings
    assert (first.plan, second.plan) == ((1, 8, 8, 1), (2, 8, 4, 2))
    assert first.step_s == pytest.approx(0.5, rel=0.05)
    assert second.step_s == pytest.approx(0.3, rel=0.05)


def test_what_a_change_costs_is_the_time_beyond_a_step(beats):
    beats.train(10, step_s=0.5, size=1)
    beats.pause(2.0)
    beats.train(10, step_s=0.5, size=2)
    assert beats.measurements.change_s == pytest.approx(2.0, abs=2 * EVERY_S + 0.01)
    beats.pause(5.0)  # other workers, but as many: the planner asks what another number costs
    beats.train(10, step_s=0.5, size=2)
    assert beats.measurements.change_s == pytest.approx(2.0, abs=2 * EVERY_S + 0.01)


@pytest.mark.parametrize("phase", ["validation", "checkpoint", "compile", "teachers", "script"])
def test_a_validation_is_not_part_of_a_step(beats, phase):
    beats.train(2.5, step_s=0.5, size=1)
    for _ in range(10):
        beats.train(2, step_s=0.5, size=1)
        beats.train(3, step_s=3.0, size=1, phase=phase)
    assert not beats.measurements.timings or beats.measurements.timings[0].step_s == pytest.approx(0.5, rel=0.1)


def test_a_world_that_just_began_is_not_measured(beats):
    for _ in range(20):
        beats.train(2.0, step_s=0.1, size=1)
        beats.pause(0.1)
    assert beats.measurements.timings == ()


def test_steps_that_are_made_again_are_not_measured_backwards(beats):
    beats.train(20, step_s=0.5, size=1)
    beats.progress -= 10
    beats.train(20, step_s=0.5, size=1)
    assert beats.measurements.timings[0].step_s == pytest.approx(0.5, rel=0.1)


def test_a_job_that_says_nothing_of_its_batch_has_no_curve(beats):
    beats.train(30, step_s=0.5, size=1, work=None)
    assert beats.measurements.timings == ()
    assert work_status((), None, 1, 4) == WorkStatus()
    assert work_left(None) is None


def test_the_curve_goes_twice_as_far_as_was_measured():
    timings = (Timing(1, 8, 8, 0.8), Timing(2, 8, 4, 0.4))
    status = work_status(timings, WORK, size=2, slots_of_host=4)
    assert status.curve is not None
    assert status.curve.sizes == (1, 2, 3, 4)
    assert status.curve.at(1) == pytest.approx(80, rel=0.05)
    assert status.curve.at(2) == pytest.approx(160, rel=0.05)
    assert status.timings == timings


def test_a_job_begins_with_what_others_of_its_family_have_measured():
    family = (Timing(1, 8, 8, 0.8), Timing(4, 8, 2, 0.2))
    begun = work_status((), WORK, size=1, slots_of_host=4, family=family)
    assert begun.timings == (), "what others have measured is not this job's to pass on"
    assert begun.curve is not None
    assert begun.curve.sizes == (1, 2, 3, 4, 6, 8)
    assert begun.curve.at(4) == pytest.approx(320, rel=0.05)
    slower = (Timing(1, 8, 8, 1.6), Timing(4, 8, 2, 0.4))
    own = work_status(slower, WORK, size=4, slots_of_host=4, family=family)
    assert own.curve is not None
    assert own.curve.at(4) == pytest.approx(160, rel=0.05), "of a plan that it has measured, its own counts"
    assert own.timings == slower
    assert work_status((), None, size=1, slots_of_host=4, family=family).curve is None


def test_where_the_batch_is_chosen_the_curve_is_that_of_rank_0():
    work = replace(WORK, sample_worth=0.5, sizes=(1, 2), goodput=(10.0, 18.0))
    assert work_status((), work, size=2, slots_of_host=4).curve == Curve((1, 2), (10.0, 18.0))
    assert work_left(work) == 3200.0
    measured = (Timing(2, 8, 4, 0.4),)
    assert work_status((), replace(work, timings=measured), size=2, slots_of_host=4).timings == measured


def test_a_later_run_goes_on_with_what_was_measured():
    before = WorkStatus(change_s=0.4, timings=(Timing(2, 8, 4, 0.4),))
    measurements = Measurements(before)
    assert measurements.timings == before.timings
    assert measurements.change_s == 0.4
