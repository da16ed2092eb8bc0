"""Choosing the batch of WorkerBatch("auto") from step times that a test makes up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from clocks import FakeClock
from fake_world import alone, together
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.rescale.goodput import best
from edl_hvd.rescale.learning import Learning
from edl_hvd.rescale.noise import Noise
from edl_hvd.rescale.policy import WorkerBatch
from edl_hvd.rescale.throughput import ThroughputModel
from edl_hvd.timings import timings_text
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.training import tuning
from edl_hvd.worker.training.process_group import WorldGroup
from edl_hvd.worker.training.tuning import EVERY_STEPS, StepTimer, choose, is_due, place, work_report

MODEL = ThroughputModel(micro_batch_s=0.05, sample_s=0.001, sync_s=0.1)
NOISE = Noise(variance=400.0, square=1.0, weight=1.0)


class Job:
    """One rank that trains in windows of N steps; its steps take what the model says."""

    def __init__(self, policy: WorkerBatch, noise: Noise = NOISE) -> None:
        self.clock = FakeClock()
        self.timer = StepTimer(self.clock)
        self.learning = Learning(noise=noise)
        self.sampler = edl_hvd.ElasticBatchSampler(10**6, policy=policy)
        self.events: list = []
        self.step = 0
        place(self.sampler, self.learning, 0, 1)

    def window(self) -> int:
        """Train until the ranks choose; the batch from then on."""
        policy = self.sampler.policy
        assert isinstance(policy, WorkerBatch)
        while not is_due(self.learning, self.step):
            parts = -(-policy.worker_batch // policy.micro_batch)
            self.clock.sleep(MODEL.step_s(1, policy.micro_batch, parts))
            self.timer.step()
            self.step += 1
        chosen = choose(
            policy,
            self.learning,
            self.step,
            self.timer,
            self.events.append,
            WorldGroup(0, 1, SoloCollectives()),
        )
        self.sampler.policy = chosen or policy
        return self.sampler.policy.worker_batch


def test_it_doubles_once_to_learn_and_then_goes_where_the_goodput_is():
    job = Job(WorkerBatch("auto", min=16, max=4096, learning_rate="adascale"))
    batches = [job.window() for _ in range(8)]
    ideal = best(MODEL, 400.0, 16, 1, (16, 4096), None).plan.worker_batch
    assert batches[0] == 32
    assert best_share(batches[-1], ideal) > 0.95
    assert all(after <= 2 * max(batches[: i + 1]) for i, after in enumerate(batches[1:]))
    assert batches[-1] == batches[-2], "it comes to rest"


def best_share(batch: int, ideal: int) -> float:
    """Of the goodput of the best batch."""
    worth = [best(MODEL, 400.0, 16, 1, (each, each), None).goodput for each in (batch, ideal)]
    return worth[0] / worth[1]


def test_predictions_become_right():
    job = Job(WorkerBatch("auto", min=16, max=4096, learning_rate="adascale"))
    for _ in range(6):
        job.window()
    assert job.events[0].predicted_samples_per_s is None
    for event in job.events[3:]:
        assert event.predicted_samples_per_s == pytest.approx(event.samples_per_s, rel=0.02)
    assert [event.step for event in job.events[:2]] == [EVERY_STEPS, 2 * EVERY_STEPS]


def test_the_bounds_and_the_memory_are_kept():
    noise = Noise(variance=1e9, square=1.0, weight=1.0)
    free = Job(WorkerBatch("auto", min=16, max=100), noise)
    assert [free.window() for _ in range(5)][-1] == 100
    bound = Job(WorkerBatch("auto", min=16, max=100, micro_batch=20), noise)
    assert [bound.window() for _ in range(5)][-1] == 40, "a worker alone gains nothing by more parts than two"
    assert bound.sampler.policy.micro_batch == 20


def test_without_noise_the_batch_stays_small_and_an_unknown_one_changes_nothing():
    quiet = Job(WorkerBatch("auto", min=16, max=4096), Noise(variance=0.0, square=1.0, weight=1.0))
    assert [quiet.window() for _ in range(4)][-1] <= 32
    unknown = Job(WorkerBatch("auto", min=16, max=4096), Noise())
    assert [unknown.window() for _ in range(3)] == [16, 16, 16]


def test_a_batch_shrinks_when_its_noise_has_gone():
    job = Job(WorkerBatch("auto", min=16, max=4096), Noise(variance=1e9, square=1.0, weight=1.0))
    grown = [job.window() for _ in range(6)][-1]
    job.learning.noise = Noise(variance=10.0, square=1.0, weight=1.0)
    assert job.window() < grown / 4


def test_a_job_of_a_family_needs_not_find_out_again_what_others_have_measured(monkeypatch):
    """Alone it doubles its batch at each look."""
    policy = WorkerBatch("auto", min=16, max=4096)
    before = Job(policy)
    assert [before.window() for _ in range(3)] == [32, 64, 128]
    last = [before.window() for _ in range(6)][-1]
    monkeypatch.setenv("EDL_HVD_FAMILY_TIMINGS", timings_text(before.learning.timings))
    assert Job(policy).window() >= last, "it is content with no less at its first look than the other at its last"
    begun = work_report(policy.with_batch(16, 1), Learning(noise=NOISE), WorldGroup(0, 1, SoloCollectives()))
    assert max(begun.sizes) == 2, "a curve before the first look"
    assert begun.timings == (), "its own ones, of which there are none yet"


def test_what_was_chosen_is_dealt_again_after_a_change_of_the_world_or_the_bounds():
    job = Job(WorkerBatch("auto", min=16, max=4096))
    job.learning.worker_batch = 300
    for policy, size, dealt in (
        (WorkerBatch("auto", min=16, max=4096), 2, 300),
        (WorkerBatch("auto", min=16, max=128), 2, 128),
        (WorkerBatch("auto", min=512, max=1024), 2, 512),
    ):
        sampler = edl_hvd.ElasticBatchSampler(10**6, policy=policy)
        learning = dataclasses.replace(job.learning)
        place(sampler, learning, 7, size)
        assert (sampler.policy.worker_batch, learning.worker_batch, learning.chosen_at) == (dealt, dealt, 7)


def test_all_ranks_take_the_choice_of_rank_0_and_the_mean_of_the_times(monkeypatch):
    """Their own fits might differ by a rounding; here one of them is led astray on purpose."""
    steps_s = (0.1, 0.3)

    def work(collectives, world):
        clock = FakeClock()
        timer, learning, events = StepTimer(clock), Learning(noise=NOISE, worker_batch=16), []
        for _ in range(10):
            clock.sleep(steps_s[world.rank])
            timer.step()
        policy = WorkerBatch("auto", min=16, max=4096).with_batch(16, 2)
        chosen = choose(policy, learning, 50, timer, events.append, WorldGroup(world.rank, world.size, collectives))
        return chosen.worker_batch, learning, len(events)

    monkeypatch.setattr(tuning, "_best", lambda *arguments: 48)
    (batch, learning, events), (other_batch, other_learning, other_events) = together(2, work)
    assert batch == other_batch == 48
    assert learning == other_learning
    assert learning.timings[0].step_s == pytest.approx(0.2)
    assert (events, other_events) == (1, 0)


@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("loader", [{}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}])
def test_a_change_in_mid_epoch_leaves_no_sample_out_and_takes_none_twice(monkeypatch, loader, commit_every):
    """What the loader has prefetched in the old plan is dropped."""
    monkeypatch.setattr(tuning, "EVERY_STEPS", 5)
    sizes = iter([8, 12, 4, 16] * 100)
    monkeypatch.setattr(tuning, "_best", lambda *arguments: next(sizes))
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
    policy = WorkerBatch("auto", min=4, max=16, learning_rate="sqrt")
    batches = edl_hvd.ElasticBatchSampler(203, policy=policy)
    data = TensorDataset(torch.arange(203), torch.randn(203, 1))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    seen: list[list[int]] = []
    factors = set()
    timed: list[int] = []
    monkeypatch.setattr(
        state._runtime.step_timer,
        "step",
        lambda step=state._runtime.step_timer.step: (timed.append(state.step), step()),
    )

    @edl_hvd.elastic(commit_every=commit_every)
    def train(state):
        items = DataLoader(data, batch_sampler=batches, **loader)
        for _ in state.epochs(3):
            seen.append([])
            for indices, inputs in state.batches(items):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                seen[-1] += indices.tolist()
                factors.add((batches.policy.worker_batch, state.learning_rate_factor**2))

    with alone():
        train(state)
    assert [sorted(epoch) for epoch in seen] == [list(range(203))] * 3
    assert {worker_batch for worker_batch, _ in factors} == {4, 8, 12, 16}
    assert all(scale == pytest.approx(worker_batch / 4) for worker_batch, scale in factors)
    assert state.samples == 609
    assert timed == list(range(1, state.step + 1)), "each step is timed, also those without a commit"


def test_an_order_made_for_one_size_of_micro_batch_is_refused():
    order = edl_hvd.GroupedOrder([0, 1] * 50, micro_batch=4)
    sampler = edl_hvd.ElasticBatchSampler(100, policy=WorkerBatch("auto", min=8, max=16, micro_batch=4), order=order)
    with pytest.raises(UsageError, match="grouped for micro-batches of 4, and WorkerBatch"):
        place(sampler, Learning(), 0, 2)
