"""The model of throughput, fitted to timings, and the batch that is chosen by it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from clocks import FakeClock

from edl_hvd.rescale.goodput import BatchPlan, batch_plan, best, efficiency, expected
from edl_hvd.rescale.throughput import ThroughputModel, fit
from edl_hvd.timings import Timing, with_timing
from edl_hvd.worker.training.tuning import StepTimer

GPU = ThroughputModel(micro_batch_s=0.03, sample_s=0.002, sync_s=0.08, sync_worker_s=0.01, overlap=2.5)
COMPUTE_BOUND = ThroughputModel(micro_batch_s=0.001, sample_s=0.01, sync_s=0.002, sync_worker_s=0.0005, overlap=1.5)
NETWORK_BOUND = ThroughputModel(micro_batch_s=0.01, sample_s=0.0001, sync_s=0.5, sync_worker_s=0.1, overlap=4.0)
MODELS = (GPU, COMPUTE_BOUND, NETWORK_BOUND)


def timings(model: ThroughputModel, *plans: tuple[int, int, int], noise: float = 0.0, seed: int = 0):
    chance = random.Random(seed)
    return [Timing(*plan, model.step_s(*plan) * math.exp(chance.gauss(0, noise))) for plan in plans]


MANY = list(itertools.product((1, 2, 4, 8), (8, 16, 32, 64), (1, 2, 3)))


def test_the_fit_finds_all_parameters_of_exact_timings():
    found = fit(timings(GPU, *MANY))
    assert found.micro_batch_s == pytest.approx(GPU.micro_batch_s, rel=0.02)
    assert found.sample_s == pytest.approx(GPU.sample_s, rel=0.02)
    assert found.sync_s == pytest.approx(GPU.sync_s, rel=0.02)
    assert found.sync_worker_s == pytest.approx(GPU.sync_worker_s, rel=0.05)
    assert found.overlap == pytest.approx(GPU.overlap, rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_the_fit_finds_what_the_timings_depend_on(model):
    """Where summing hardly shows, its parameters are not to be had; what they predict is."""
    found = fit(timings(model, *MANY))
    assert found.micro_batch_s == pytest.approx(model.micro_batch_s, rel=0.02)
    assert found.sample_s == pytest.approx(model.sample_s, rel=0.02)
    for plan in MANY:
        assert found.step_s(*plan) == pytest.approx(model.step_s(*plan), rel=0.02)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_noisy_timings_are_predicted_within_their_noise(model, seed):
    found = fit(timings(model, *MANY, noise=0.1, seed=seed))
    errors = [abs(math.log(found.step_s(*plan) / model.step_s(*plan))) for plan in MANY]
    assert max(errors) < 0.15


def test_two_batches_of_one_worker_give_the_fixed_and_the_variable_cost():
    found = fit(timings(GPU, (1, 8, 2), (1, 64, 2)))
    assert found.micro_batch_s == pytest.approx(GPU.micro_batch_s, rel=0.01)
    assert found.sample_s == pytest.approx(GPU.sample_s, rel=0.01)
    assert (found.sync_s, found.sync_worker_s) == (0, 0), "what was never seen is free, as in Pollux"


def test_one_timing_is_met_whatever_it_is_made_of():
    (timing,) = timings(GPU, (2, 16, 1))
    assert fit([timing]).step_s(2, 16, 1) == pytest.approx(timing.step_s, rel=1e-3)


def test_a_step_without_overlap_is_the_sum_and_with_much_of_it_the_longer_part():
    alone_s = ThroughputModel(0.1, 0.01).step_s(1, 10, 1)
    assert alone_s == pytest.approx(0.2)
    assert ThroughputModel(0.1, 0.01, sync_s=0.5).step_s(2, 10, 1) == pytest.approx(0.7)
    assert ThroughputModel(0.1, 0.01, sync_s=0.5, overlap=10).step_s(2, 10, 1) == pytest.approx(0.5, rel=1e-3)


def test_a_plan_that_was_measured_before_is_averaged():
    known: tuple[Timing, ...] = ()
    for step_s in (1.0, 4.0, 2.0):
        known = with_timing(known, Timing(2, 8, 1, step_s))
    assert [timing.windows for timing in known] == [3]
    assert known[0].step_s == pytest.approx(2.0)
    assert len(with_timing(known, Timing(3, 8, 1, 1.0))) == 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("noise", [0.0, 50.0, 2000.0, math.inf])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("largest", [None, 32])
def test_the_best_batch_is_that_of_trying_all(model, noise, size, largest):
    least, most = 8, 200
    found = best(model, noise, 8, size, (least, most), largest)
    everything = [
        expected(model, noise, 8, size, BatchPlan(micro_batch, parts))
        for micro_batch in range(1, (largest or most) + 1)
        for parts in range(2 if size == 1 else 1, most // micro_batch + 1)
        if least <= micro_batch * parts <= most
    ]
    # Only batches of as few parts as fit are tried; where no multiple of them hits the bound, that costs a little.
    assert found.goodput == pytest.approx(max(option.goodput for option in everything), rel=0.02 if largest else 1e-9)
    assert least <= found.plan.worker_batch <= most
    assert found.plan.micro_batch <= (largest or most)


def test_noise_decides_how_far_the_batch_grows():
    batches = [best(GPU, noise, 8, 4, (8, 512), None).plan.worker_batch for noise in (1.0, 100.0, 10_000.0)]
    assert batches == sorted(batches)
    assert batches[0] < batches[1] < batches[2]


def test_wide_bounds_are_searched_in_steps():
    found = best(COMPUTE_BOUND, math.inf, 8, 2, (8, 1_000_000), None)
    assert found.plan.worker_batch == 1_000_000


def test_efficiency_falls_from_one_to_the_share_of_the_noise():
    assert efficiency(100.0, 32, 32) == 1.0
    assert efficiency(0.0, 32, 64) == 0.5
    assert efficiency(math.inf, 32, 10**9) == 1.0


@pytest.mark.parametrize("worker_batch", range(1, 40))
@pytest.mark.parametrize("largest", [None, 1, 7, 16])
@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_covers_the_batch_in_parts_that_fit(worker_batch, largest, size):
    plan = batch_plan(worker_batch, size, largest)
    assert plan.worker_batch >= worker_batch
    assert plan.micro_batch * (plan.accumulation_steps - 1) < worker_batch, "a part too many"
    assert plan.micro_batch <= (largest or worker_batch)
    assert plan.accumulation_steps >= (2 if size == 1 and worker_batch > 1 else 1)


def test_the_timer_leaves_out_pauses_and_takes_the_median():
    clock = FakeClock()
    timer = StepTimer(clock)
    for seconds in (0, 1, 1, 30, 1):
        clock.sleep(seconds)
        timer.step()
    timer.pause()
    clock.sleep(500)
    timer.step()
    clock.sleep(3)
    timer.step()
    assert timer.take_ns() == 1_000_000_000
    assert timer.take_ns() == 0
