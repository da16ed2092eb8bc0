"""``state.evaluate`` in a world of one, and what it refuses; ``tests/elastic/test_evaluation.py`` has the others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from clocks import FakeClock
from fake_world import alone
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.errors import StateError, UsageError, WorldBrokenError
from edl_hvd.metrics import Mean, Sum
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


def make(samples=20, **kept):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    dataset = TensorDataset(torch.arange(samples), torch.randn(samples, 4))
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=8)
    val_batches = edl_hvd.EvaluationSampler(samples, batch_size=6)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, val_batches=val_batches, **kept)
    return state, DataLoader(dataset, batch_sampler=batches), DataLoader(dataset, batch_sampler=val_batches)


def train(state, loader):
    for _, inputs in state.batches(loader):
        state.optimizer.zero_grad()
        state.model(inputs).square().mean().backward()
        state.optimizer.step()


@given(
    length=st.integers(1, 100), batch_size=st.integers(1, 12),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=5),
)  # fmt: skip
def test_each_sample_is_dealt_once_whatever_the_worlds(length, batch_size, worlds):
    saved, dealt = EvaluationSampler(length, batch_size).state_dict(), []
    for size, rounds in [*worlds, (2, length)]:
        samplers = [EvaluationSampler(length, batch_size) for _ in range(size)]
        for rank, sampler in enumerate(samplers):
            sampler.load_state_dict(saved)
            sampler.set_world(rank, size)
            assert len(list(sampler)) == len(sampler)
        shares = [list(sampler.rounds())[:rounds] for sampler in samplers]
        assert len({tuple(round_.end for round_ in share) for share in shares}) == 1, "as many rounds on every rank"
        for same_round in zip(*shares, strict=True):
            ranges = [part for round_ in same_round for part in round_.share]
            assert all(last - first <= batch_size and first % batch_size == 0 for first, last in ranges)
            dealt += [index for part in ranges for index in range(*part)]
            samplers[0].offset = same_round[0].end
        saved = samplers[0].state_dict()
    assert dealt == list(range(length))


def run_elastic(function, state):
    """Call an elastic function where worlds may break and form anew."""
    edl_hvd.shutdown()
    edl_hvd.init(Elastic())
    try:
        function(state)
    finally:
        edl_hvd.shutdown()


def test_an_evaluation_after_each_epoch_is_of_all_samples():
    state, loader, val_loader = make(loss=Mean(), seen=Sum(), best=Sum())
    found = []

    @edl_hvd.elastic
    def run(state):
        for _ in state.epochs(3):
            train(state, loader)
            for index, inputs in state.evaluate(val_loader):
                state.seen.update(index)
                state.loss.update(state.model(inputs).detach())
            found.append((state.seen.compute(), state.loss.compute()))

    with alone():
        run(state)
    assert [seen for seen, _ in found] == [190.0] * 3
    assert len({loss for _, loss in found}) == 3
    assert state.step == 9


def break_once_at(moments):
    """A function that breaks the world at each of the given calls of it."""
    calls = itertools.count(1)  # not a number that the function sets, of which it would be warned

    def point():
        if next(calls) in moments:
            raise WorldBrokenError("ordered by the test")

    return point


class Elastic(SoloRendezvous):
    elastic = True


@pytest.mark.parametrize("moments", [{1}, {2}, {4}, {3, 5, 6}, {4, 5}, {8}])
def test_a_broken_world_goes_on_in_the_middle(moments, monkeypatch):
    state, loader, val_loader = make(seen=Sum(), trained=Sum())
    point, entered, found = break_once_at(moments), [], []

    @edl_hvd.elastic
    def run(state):
        entered.append((state.step, state.val_batches.offset))
        for _ in state.epochs(2):
            state.trained.reset()  # does no harm
            for index, inputs in state.batches(loader):
                state.optimizer.zero_grad()
                state.model(inputs).square().mean().backward()
                state.optimizer.step()
                state.trained.update(index)
            state.seen.reset()
            for index, _ in state.evaluate(val_loader):
                point()
                state.seen.update(index)
            found.append((state.seen.compute(), state.trained.compute(), state.step))

    run_elastic(run, state)
    assert len(entered) == 1 + len(moments)
    assert found == [(190.0, 190.0, 3), (190.0, 190.0, 6)]


def test_a_world_that_breaks_after_an_evaluation_does_not_make_it_again():
    state, loader, val_loader = make(seen=Sum())
    point, loops, values = break_once_at({1}), [], []

    @edl_hvd.elastic
    def run(state):
        for _ in state.epochs(2):
            train(state, loader)
            loops.append(0)
            for index, _ in state.evaluate(val_loader):
                loops[-1] += 1
                state.seen.update(index)
            values.append(state.seen.compute())
            point()

    run_elastic(run, state)
    assert loops == [4, 0, 4]
    assert values == [190.0] * 3


def test_two_evaluations_in_one_place_are_two():
    state, _, val_loader = make(first=Sum(), second=Sum())
    point, loops = break_once_at({6, 9}), []

    @edl_hvd.elastic
    def run(state):
        for metric in (state.first, state.second):
            loops.append(0)
            for index, _ in state.evaluate(val_loader):
                point()
                loops[-1] += 1
                metric.update(index)

    run_elastic(run, state)
    assert (state.first.compute(), state.second.compute()) == (190.0, 190.0)
    assert loops[0] == 4
    assert loops[2] == loops[4] == 0, "the first one was complete"


def test_a_checkpoint_has_metrics(tmp_path):
    for expected in (190.0, 380.0):
        state, loader, val_loader = make(seen=Sum(), all_seen=Sum())

        @edl_hvd.elastic(checkpoint=tmp_path)
        def run(state, loader=loader, val_loader=val_loader, epochs=int(expected / 190)):
            for _ in state.epochs(epochs):
                train(state, loader)
                for index, _ in state.evaluate(val_loader):
                    state.seen.update(index)
                state.all_seen.update(state.seen.compute())  # outside of the loops nothing starts anew

        with alone():
            run(state)
        assert (state.seen.compute(), state.all_seen.compute()) == (190.0, expected)


def test_commits_come_once_a_second_and_from_the_first_batch_on():
    from edl_hvd.worker.batch_loops.evaluation import _Pace

    clock = FakeClock()
    pace, commits = _Pace(clock), []
    for number in range(1, 61):
        clock.now_s += 0.1 if number <= 40 else 2.0
        if pace.is_due():
            commits.append(number)
            pace.next(pace.proposal())
    # After 1, 2 and 4 more; then ten in a second; then rounds take two seconds each.
    assert commits[:5] == [1, 3, 7, 15, 25]
    assert commits[-5:] == [56, 57, 58, 59, 60]


def test_randomness_in_a_batch_depends_on_its_place_alone():
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state, _, val_loader = make()
        with alone():
            drawn.append([torch.rand(1).item() for _ in state.evaluate(val_loader)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4


def other_loader(state, val_loader):
    return DataLoader(val_loader.dataset, batch_size=4)


def other_sampler(state, val_loader):
    return DataLoader(val_loader.dataset, batch_sampler=edl_hvd.EvaluationSampler(20, 4))


def other_length(state, val_loader):
    return DataLoader(TensorDataset(torch.arange(21)), batch_sampler=state.val_batches)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_loader, r"batch_sampler is BatchSampler; expected DataLoader\(dataset, batch_sampler=EvaluationSampler"),
        (other_sampler, r"expected State\(…, val_batches=sampler\)"),
        (other_length, "a data set of 21 samples and an EvaluationSampler of 20"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    state, _, val_loader = make()
    with alone(), pytest.raises(UsageError, match=said):
        next(state.evaluate(change(state, val_loader)))


def test_an_evaluation_inside_a_training_batch_is_refused():
    state, loader, val_loader = make()

    @edl_hvd.elastic
    def run(state):
        for _ in state.batches(loader):
            for _ in state.evaluate(val_loader):
                pass

    with alone(), pytest.raises(UsageError, match="call it after that loop"):
        run(state)


def test_a_validation_set_of_another_length_than_saved_is_refused():
    with pytest.raises(StateError, match="of 20 samples, this sampler has 21"):
        EvaluationSampler(21, 4).load_state_dict(EvaluationSampler(20, 4).state_dict())


@pytest.mark.parametrize("arguments", [(0, 4), (20, 0), (20, 2.5)])
def test_a_sampler_of_nothing_is_refused(arguments):
    with pytest.raises(UsageError, match="whole number of at least 1"):
        EvaluationSampler(*arguments)


def test_outside_of_an_elastic_function_it_is_a_loop():
    state, _, val_loader = make(mean=Mean())
    for index, _ in state.evaluate(val_loader):
        state.mean.update(index)
    assert state.mean.compute() == 9.5
    assert not math.isnan(state.mean.compute())
