"""When a checkpoint is due, and that "auto" chooses the interval that loses the least time."""

import math
import random

import pytest
from clocks import FakeClock

from edl_hvd.checkpoint.writing.schedule import CheckpointSchedule, least_loss_interval_s
from edl_hvd.errors import SettingsError
from edl_hvd.settings import Settings
from edl_hvd.values import Interval

AUTO = Interval.parse_or_auto("auto")
DAY_S = 86400.0


def lost_share(interval_s: float, cost_s: float, between_failures_s: float) -> float:
    """Of the time of a job with failures at random moments, the share that did no lasting work."""
    chance = random.Random(0)
    work_s = total_s = 0.0
    for _ in range(4000):
        lives_s = chance.expovariate(1 / between_failures_s)
        work_s += math.floor(lives_s / (interval_s + cost_s)) * interval_s
        total_s += lives_s
    return 1 - work_s / total_s


@pytest.mark.parametrize(("cost_s", "between_failures_s"), [(0.1, 3600), (2, 3600), (30, 3600), (300, 3600), (1, 60)])
def test_no_other_interval_loses_noticeably_less(cost_s, between_failures_s):
    best_s = least_loss_interval_s(cost_s, between_failures_s)
    loss = lost_share(best_s, cost_s, between_failures_s)
    others = [lost_share(best_s * factor, cost_s, between_failures_s) for factor in (0.25, 0.5, 0.7, 1.4, 2, 4)]
    assert loss < min(others) * 1.02
    assert loss < min(others[0], others[-1]) * 0.9, "and it matters"


def test_a_checkpoint_that_costs_more_than_a_failure_is_hardly_ever_written():
    assert least_loss_interval_s(500, 200) == 200


@pytest.mark.parametrize(
    ("every", "before", "after"),
    [
        ("500 steps", (499, 10**6, 50.0), (500, 0, 0.0)),
        ("1000 samples", (10**6, 999, 50.0), (0, 1000, 0.0)),
        ("0.5 epochs", (10**6, 10**6, 0.49), (0, 0, 0.5)),
    ],
)
def test_an_interval_counts_from_the_last_mark(every, before, after):
    schedule = CheckpointSchedule(Interval.parse(every), FakeClock())
    for base in (0, 7):
        schedule.mark(base, base, base)
        assert not schedule.is_due(*(base + count for count in before))
        assert schedule.is_due(*(base + count for count in after))


def test_an_interval_in_seconds_passes_whatever_the_steps():
    clock = FakeClock()
    schedule = CheckpointSchedule(Interval.parse("10min"), clock)
    schedule.mark(0, 0, 0)
    clock.sleep(599)
    assert not schedule.is_due(10**6, 10**6, 10.0)
    clock.sleep(1)
    assert schedule.is_due(0, 0, 0.0)


def train(schedule, clock, commits, step_s, writing=False):
    for _ in range(commits):
        clock.sleep(step_s)
        schedule.note_commit(writing)


def test_what_a_checkpoint_costs_is_its_stall_and_the_slower_steps_while_it_is_written():
    clock = FakeClock()
    schedule = CheckpointSchedule(AUTO, clock)
    train(schedule, clock, commits=50, step_s=1.0)
    clock.sleep(0.5)
    schedule.note_stall(0.5)
    train(schedule, clock, commits=10, step_s=1.2, writing=True)
    clock.sleep(600)  # a validation
    schedule.note_commit(writing=True)
    train(schedule, clock, commits=50, step_s=1.0)
    assert schedule.cost_s == pytest.approx(0.5 + 10 * 0.2)
    schedule.note_stall(0.7)
    assert schedule.cost_s == pytest.approx(0.7), "it is that of the last one"


def test_losses_of_all_holders_shorten_the_interval_and_quiet_days_lengthen_it():
    clock = FakeClock()
    schedule = CheckpointSchedule(AUTO, clock)
    schedule.note_stall(1.0)
    assert schedule.interval_s == pytest.approx(least_loss_interval_s(1.0, DAY_S))
    schedule.learn(24, DAY_S)
    stormy_s = schedule.interval_s
    assert stormy_s == pytest.approx(least_loss_interval_s(1.0, 2 * DAY_S / 25))
    clock.sleep(30 * DAY_S)
    assert schedule.interval_s > 2 * stormy_s


def test_what_others_know_of_the_job_counts_once():
    clock = FakeClock()
    schedule = CheckpointSchedule(AUTO, clock)
    schedule.learn(3, 1000.0)
    clock.sleep(50)
    for losses, watched_s in ((3, 1000.0), (2, 1050.0), (3, 1050.0), (0, 0.0)):
        schedule.learn(losses, watched_s)
    assert (schedule.losses, schedule.watched_s) == (3, 1050.0)


@pytest.mark.parametrize(("stall_s", "interval_s"), [(0.0, 10.0), (1e-6, 10.0), (5000.0, 3600.0)])
def test_the_interval_stays_between_ten_seconds_and_an_hour(stall_s, interval_s):
    schedule = CheckpointSchedule(AUTO, FakeClock())
    schedule.note_stall(stall_s)
    assert schedule.interval_s == interval_s


def test_auto_is_the_default():
    assert Settings().checkpoint_every == AUTO


def test_auto_is_a_setting_and_a_typing_error_says_so():
    assert Settings.from_environment({"EDL_HVD_CHECKPOINT_EVERY": " Auto "}).checkpoint_every == AUTO
    assert Settings.from_environment({}, checkpoint_every="auto").checkpoint_every == AUTO
    with pytest.raises(SettingsError, match="'1 epoch', greater than zero, or 'auto'"):
        Settings.from_environment({}, checkpoint_every="automatic")
    with pytest.raises(SettingsError, match=r"greater than zero$"):
        Interval.parse("auto")
