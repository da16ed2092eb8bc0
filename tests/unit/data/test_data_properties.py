"""For any data set, order, batch, sequence of worlds and places where they break: what is counted in the end."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_world import alone
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.data.order import GroupedOrder, Order, ShuffledOrder, WeightedOrder
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.data.shard_order import ShardOrder
from edl_hvd.rescale.policy import BatchPolicy, GlobalBatch, WorkerBatch

EPOCHS = 2


@dataclass(frozen=True)
class World:
    """A world of one training, from its beginning to its end.

    Attributes:
        size: Workers.
        steps: Optimizer steps that all of its ranks make, unless the training ends before.
        ahead: When it breaks, some ranks have counted one step more; the next world goes on from these.
        lost: The whole world dies, and what was made since the last checkpoint, N steps ago, is gone.
    """

    size: int
    steps: int
    ahead: bool
    lost: int | None


worlds = st.lists(
    st.builds(World, st.integers(1, 8), st.integers(0, 12), st.integers(0, 8), st.none() | st.integers(0, 5)),
    max_size=8,
)
micro_batches = st.builds(
    lambda parts, micro_batch: GlobalBatch(parts * micro_batch, micro_batch), st.integers(1, 8), st.integers(1, 8)
)
policies = st.one_of(
    st.builds(GlobalBatch, st.integers(1, 40)),
    micro_batches,
    st.builds(WorkerBatch, st.integers(1, 12)),
    st.builds(lambda parts, micro_batch: WorkerBatch(parts * micro_batch, micro_batch=micro_batch),
              *[st.integers(1, 4)] * 2),
)  # fmt: skip


@st.composite
def orders(draw, length, policy) -> Order:
    kinds = ["shuffled", "weighted", "shards", *(["grouped"] if policy.micro_batch else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "weighted":
        return WeightedOrder(draw(st.lists(st.floats(0.1, 1), min_size=length, max_size=length)))
    if kind == "grouped":
        return GroupedOrder(draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)), policy.micro_batch)
    if kind == "shards":
        cuts = sorted([0, length, *draw(st.lists(st.integers(0, length), max_size=6))])
        counts = [end - begin for begin, end in itertools.pairwise(cuts)]
        return ShardOrder(counts, draw(st.integers(1, 5)), draw(st.integers(1, 6)))
    return ShuffledOrder(length)


class Training:
    """What the members of all worlds count, as ``state.batches`` counts it."""

    def __init__(self, length: int, policy: BatchPolicy, order: Order | None = None, **options: Any) -> None:
        self.new_sampler = lambda: ElasticBatchSampler(length, policy=policy, order=order, seed=5, **options)
        self.states = [self.new_sampler().state_dict()]  # after each step counted
        self.steps: list[tuple[int, list[list[int]]]] = []  # epoch and micro-batches of each step

    def live(self, world: World, unit: int | None) -> None:
        """Through a world; every rank has a sampler of its own, as in a process of its own."""
        samplers = [self.new_sampler() for _ in range(world.size)]
        for rank, sampler in enumerate(samplers):
            sampler.load_state_dict(self.states[-1])
            sampler.set_world(rank, world.size)
        for _ in range(world.steps + world.ahead):
            if not self._step(samplers, unit):
                break
        if world.lost is not None:
            kept = max(1, len(self.states) - world.lost)
            self.states, self.steps = self.states[:kept], self.steps[: kept - 1]

    def _step(self, samplers: list[ElasticBatchSampler], unit: int | None) -> bool:
        if samplers[0].epoch == EPOCHS:
            return False
        steps = [next(sampler.steps(), None) for sampler in samplers]
        if steps[0] is None:
            for sampler in samplers:
                sampler.set_epoch(sampler.epoch + 1)
            return self._step(samplers, unit)
        assert len({(step.offset, step.samples) for step in steps}) == 1, "the ranks make different steps"
        shares = [len(step.share) if unit else sum(last - first for first, last in step.share) for step in steps]
        assert max(shares) - min(shares) <= 1, "shares differ by more than a micro-batch (or a sample)"
        dealt = []
        for sampler, step in zip(samplers, steps, strict=True):
            batches = iter(sampler)  # a loader looks ahead from here, as far as it likes
            mine = [next(batches) for _ in step.share]
            assert [len(batch) for batch in mine] == [last - first for first, last in step.share]
            dealt += mine
        assert sum(map(len, dealt)) == steps[0].samples
        epoch = samplers[0].epoch
        for sampler, step in zip(samplers, steps, strict=True):
            sampler.advance(step)
        self.states.append(samplers[0].state_dict())
        self.steps.append((epoch, dealt))
        return True

    def finish(self, unit: int | None) -> None:
        self.live(World(1, 10**6, False, None), unit)

    def indices(self, epoch: int) -> list[int]:
        return [index for of, dealt in self.steps if of == epoch for batch in dealt for index in batch]


@settings(max_examples=80)
@given(data=st.data(), length=st.integers(1, 150), policy=policies, worlds=worlds)
def test_each_sample_once_per_epoch_in_an_order_of_its_own(data, length, policy, worlds):
    order = data.draw(orders(length, policy))
    training = Training(length, policy, order)
    for world in worlds:
        training.live(world, policy.micro_batch)
    training.finish(policy.micro_batch)
    for epoch in range(EPOCHS):
        indices = training.indices(epoch)
        assert indices == order.samples(5, epoch, 0, order.positions), "the order depends on the world"
        if not order.repeats:
            assert Counter(indices) == Counter(range(length))


@settings(max_examples=50)
@given(
    data=st.data(), length=st.integers(1, 150), worlds=worlds, parts=st.integers(1, 8), micro_batch=st.integers(1, 8)
)
def test_with_a_global_batch_the_very_same_steps_and_micro_batches(data, length, worlds, parts, micro_batch):
    policy = GlobalBatch(parts * micro_batch, micro_batch)
    drop_last = length >= policy.size and data.draw(st.booleans())
    elastic, fixed = (Training(length, policy, drop_last=drop_last) for _ in range(2))
    for world in worlds:
        elastic.live(world, micro_batch)
    elastic.finish(micro_batch)
    fixed.finish(micro_batch)
    assert elastic.steps == fixed.steps
    assert elastic.states == fixed.states


@settings(max_examples=50)
@given(length=st.integers(1, 150), worlds=worlds, policy=policies)
def test_drop_last_leaves_out_less_than_a_batch(length, worlds, policy):
    """Of the world that comes to the end of the epoch; nothing is counted twice."""
    length = max(length, policy.global_batch(1))
    training = Training(length, policy, drop_last=True)
    for world in worlds:
        training.live(world, policy.micro_batch)
    training.finish(policy.micro_batch)
    for epoch in range(EPOCHS):
        indices = training.indices(epoch)
        assert len(set(indices)) == len(indices)
        assert length - len(indices) < policy.global_batch(8)


# -- the last batch of an epoch --


@pytest.mark.parametrize(("samples", "micro_batch"), [(13, None), (13, 5), (18, 5), (3, 5), (11, 2)])
def test_the_gradient_of_a_short_last_batch_is_the_mean_over_its_samples(samples, micro_batch):
    """Also where its last micro-batch is short: a mean of the means would weigh the samples in there more."""
    inputs = torch.randn(samples, 3, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=10, micro_batch=micro_batch)
    loader = DataLoader(TensorDataset(torch.arange(samples), inputs), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    found = []

    @edl_hvd.elastic
    def train(state):
        of_step = []
        for indices, rows in state.batches(loader):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            of_step += indices.tolist()
            if optimizer.at_boundary:
                found.append((of_step, [parameter.grad.clone() for parameter in model.parameters()]))
                of_step = []
            optimizer.step()

    with alone():
        train(state)
    assert [len(indices) for indices, _ in found] == [10] * (samples // 10) + [samples % 10]
    for indices, gradients in found:
        expected = torch.autograd.grad(model(inputs[indices]).square().mean(), list(model.parameters()))
        for gradient, exact in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-12)
