"""From measured steps to what a job makes of a number of workers."""

from __future__ import annotations

import pytest

from edl_hvd.rescale.curve import goodput_by_size, hosts_of, sizes_up_to, throughput_by_size
from edl_hvd.rescale.learning import Learning
from edl_hvd.rescale.policy import WorkerBatch
from edl_hvd.rescale.throughput import ThroughputModel, fit
from edl_hvd.timings import Timing
from edl_hvd.work_report import WorkReport

# Four slots per host; to sum between hosts takes ten times as long as within one.
NETWORK = ThroughputModel(
    micro_batch_s=0.01, sample_s=0.001, sync_s=0.02, sync_worker_s=0.002, overlap=1.0, between_sync_s=0.2,
    between_sync_worker_s=0.01,
)  # fmt: skip
SLOTS = 4


def timing(size: int, micro_batch: int, parts: int, model: ThroughputModel = NETWORK) -> Timing:
    hosts = hosts_of(size, SLOTS)
    return Timing(size, micro_batch, parts, model.step_s(size, micro_batch, parts, hosts), hosts=hosts)


MEASURED = [timing(size, micro, parts) for size in (1, 2, 3, 4, 6, 8, 12) for micro in (8, 32) for parts in (1, 3)]


def test_the_fit_tells_summing_within_a_host_from_summing_between_hosts():
    found = fit(MEASURED)
    assert found.sync_s == pytest.approx(0.02, rel=0.1)
    assert found.between_sync_s == pytest.approx(0.2, rel=0.1)
    for one in MEASURED:
        assert found.step_s(*one.plan) == pytest.approx(one.step_s, rel=0.02)
    blind = fit([Timing(one.size, one.micro_batch, one.accumulation_steps, one.step_s) for one in MEASURED])
    errors = [abs(blind.step_s(*one.plan[:3]) / one.step_s - 1) for one in MEASURED]
    assert max(errors) > 0.1, "without the second pair these timings cannot be told"


def test_without_a_world_on_several_hosts_summing_there_is_like_within_a_host():
    found = fit([timing(size, micro, 1) for size in (1, 2, 4) for micro in (8, 32)])
    assert found.between_sync_s is None
    assert found.step_s(4, 8, 1, hosts=2) == found.step_s(4, 8, 1)


def test_a_curve_shows_the_step_from_one_host_to_two():
    """From 4 to 5 workers a second host comes, and with it the slow network: that is worth nothing here."""
    work = WorkReport(global_batch=96, micro_batch=8)
    found = throughput_by_size([timing(size, 8, -(-12 // size)) for size in (1, 2, 4, 6, 8)], work, 4, SLOTS)
    for size in (1, 2, 3, 4, 6, 8, 12):
        parts = -(-12 // size)
        true = 96 / NETWORK.step_s(size, 8, parts, hosts_of(size, SLOTS))
        assert found[size] == pytest.approx(true, rel=0.05)
    assert found[6] < found[4]
    assert max(found) == 16, "twice as many as were measured"


def test_a_batch_per_worker_grows_with_the_world():
    work = WorkReport(global_batch=64, micro_batch=16, grows=True)
    found = throughput_by_size([timing(size, 16, 2) for size in (1, 2, 4)], work, size=2, slots_of_host=SLOTS)
    for size in (1, 2, 4):
        assert found[size] == pytest.approx(32 * size / NETWORK.step_s(size, 16, 2), rel=0.05)


def test_more_workers_than_micro_batches_gain_nothing():
    found = throughput_by_size([timing(1, 8, 2), timing(2, 8, 1)], WorkReport(16, 8), 2, SLOTS)
    assert found[4] <= found[2]


def test_goodput_of_a_chosen_batch_falls_short_of_throughput_where_the_noise_is_small():
    policy = WorkerBatch("auto", min=8, max=64).with_batch(8, 1)
    quiet = goodput_by_size(MEASURED, policy, noise_samples=16.0, slots_of_host=SLOTS)
    noisy = goodput_by_size(MEASURED, policy, noise_samples=1e6, slots_of_host=SLOTS)
    assert quiet[4] / quiet[1] < noisy[4] / noisy[1]
    assert all(quiet[size] <= noisy[size] for size in quiet)


def test_sizes_are_few_and_reach_the_end():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(7) == (1, 2, 3, 4, 6, 7)
    assert len(sizes_up_to(10_000)) < 30


def test_timings_of_an_earlier_version_are_those_of_one_host():
    saved = Learning(timings=(Timing(4, 8, 1, 0.5, 3, 2),)).as_dict()
    assert Learning.from_dict(saved).timings[0].hosts == 2
    saved["timings"] = [row[:5] for row in saved["timings"]]
    assert Learning.from_dict(saved).timings[0].hosts == 1
