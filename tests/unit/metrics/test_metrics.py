"""Metrics are what one process would compute, whatever the world."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from fake_world import together
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.errors import StateError, UsageError
from edl_hvd.metrics import AUC, Accuracy, Max, Mean, Min, Sum, sums
from edl_hvd.metrics.exact_sum import carried, exact_sum, ratio_of, value_of
from edl_hvd.worker.training.metric_sync import sync_metrics
from edl_hvd.worker.training.process_group import WorldGroup

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=64)
THREADS = settings(max_examples=25)


# --- sums without rounding ---


@given(st.lists(NUMBERS, max_size=60), st.randoms(use_true_random=False))
def test_a_sum_is_exact_however_it_is_grouped(values, random):
    whole = exact_sum(torch.tensor(values, dtype=torch.float64))
    random.shuffle(values)
    cut = random.randint(0, len(values))
    halves = [exact_sum(torch.tensor(part, dtype=torch.float64)) for part in (values[:cut], values[cut:])]
    expected = sum(map(Fraction, values))
    for words in (whole, halves[0] + halves[1], carried(halves[0]) + halves[1], carried(carried(whole))):
        assert value_of(words) == _nearest(expected)
        if expected:
            assert ratio_of(words, words) == 1.0


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@given(st.lists(NUMBERS.filter(lambda value: abs(value) < 1e300), min_size=1, max_size=20))
def test_a_mean_is_the_nearest_number_to_the_true_one(values):
    mean = Mean()
    for value in values:
        mean.update(torch.tensor(value, dtype=torch.float64))
    assert mean.compute() == _nearest(sum(map(Fraction, values), Fraction(0)) / len(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1e308, 1e308, -1e308], 1e308),  # no infinity in between
        ([5e-324] * 3, 1.5e-323),
        ([], 0.0),
    ],
)
def test_what_is_not_finite_stays_visible(values, expected):
    total = Sum()
    total.update(torch.tensor(values, dtype=torch.float64))
    assert total.compute() == pytest.approx(expected, nan_ok=True, rel=0)


def test_a_sum_does_not_overflow_over_many_updates():
    ones = torch.full((1000,), -((1 << 53) - 1.0), dtype=torch.float64)
    words = torch.zeros_like(exact_sum(ones))
    for _ in range(100):
        words = carried(words + exact_sum(ones))
    assert value_of(words) == -((1 << 53) - 1.0) * 100_000


@pytest.fixture
def of_equal_values(monkeypatch):
    """Sums of values that are all the same, without the memory that so many take."""
    monkeypatch.setattr(sums, "exact_sum", lambda values: exact_sum(values.view(-1)[:1]) * values.numel())
    return lambda value, count: torch.tensor(value, dtype=torch.float64).expand(count)


@pytest.mark.parametrize("value", [2 / 3, -2 / 3])
def test_billions_of_values_between_two_commits_do_not_overflow(of_equal_values, value):
    mean, total = Mean(), Sum()
    for _ in range(40):
        mean.update(of_equal_values(value, 1 << 28))
        total.update(of_equal_values(value, 1 << 28))
    assert mean.compute() == value
    assert total.compute() == _nearest(Fraction(value) * (40 << 28))


def test_billions_of_values_over_all_ranks_do_not_overflow(of_equal_values):
    def work(collectives, world):
        metrics: list[Mean | Sum] = [Mean(), Sum()]
        for metric in metrics:
            metric.set_world(16)
            for count in (1 << 28, 1):
                metric.update(of_equal_values(2 / 3, count))
        sync_metrics(metrics, WorldGroup(world.rank, 16, collectives), None, 0)
        return [metric.compute() for metric in metrics]

    expected = [2 / 3, _nearest(Fraction(2 / 3) * 16 * ((1 << 28) + 1))]
    assert together(16, work) == [expected] * 16


def test_bits_far_apart_are_both_kept():
    total = Sum()
    total.update(torch.tensor([2.0**1000, 2.0**-1000, -(2.0**1000)], dtype=torch.float64))
    assert total.compute() == 2.0**-1000


# --- each metric ---


def test_a_mean_weighs_by_samples():
    mean = Mean()
    mean.update(torch.tensor(1.0, requires_grad=True), weight=3)
    mean.update(torch.tensor([2.0, 4.0], dtype=torch.bfloat16), weight=torch.tensor([1, 0]))
    mean.update(7, weight=0)
    assert mean.compute() == 5 / 4
    assert math.isnan(Mean().compute())


@given(
    st.integers(1, 5), st.integers(0, 30),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 10**6),
)  # fmt: skip
def test_accuracy_is_that_of_the_first_guesses(top_k, samples, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    # Few different scores: many are equal.
    scores = torch.randint(4, (samples, 6), generator=generator).to(dtype)
    target = torch.randint(6, (samples,), generator=generator)
    accuracy = Accuracy(top_k=top_k)
    accuracy.update(scores, target)
    guesses = [sorted(range(6), key=lambda c, row=row: (-row[c], c))[:top_k] for row in scores.tolist()]
    hits = sum(right in guess for right, guess in zip(target.tolist(), guesses, strict=True))
    assert accuracy.compute() == pytest.approx(hits / samples if samples else math.nan, nan_ok=True, rel=0)
    assert accuracy.samples == samples


def test_accuracy_is_scikit_learns():
    from sklearn.metrics import top_k_accuracy_score

    scores, target = torch.randn(5000, 10), torch.randint(10, (5000,))
    for top_k in (1, 5):
        accuracy = Accuracy(top_k)
        accuracy.update(scores, target)
        assert accuracy.compute() == top_k_accuracy_score(target, scores, k=top_k)


def test_accuracy_takes_pixels_and_classes():
    target = torch.randint(3, (2, 4, 5))
    scores = torch.nn.functional.one_hot(target, 3).movedim(-1, 1).float()
    for guesses in (scores, target):
        accuracy = Accuracy()
        accuracy.update(guesses, target)
        assert (accuracy.compute(), accuracy.samples) == (1.0, 40)


def test_a_model_that_returns_nan_is_not_right():
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[math.nan, math.nan], [0.0, math.nan], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
    assert accuracy.compute() == 1 / 3


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_scikit_learns_on_100_000_scores(ties):
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(1)
    target = torch.rand(100_000, generator=generator) < 0.3
    scores = torch.randn(100_000, generator=generator) + target
    if ties:
        scores = scores.mul(5).round()
    auc = AUC()
    for part, classes in zip(scores.split(7_777), target.split(7_777), strict=True):
        auc.update(part, classes)
    assert auc.compute() == pytest.approx(roc_auc_score(target, scores), abs=1e-12)
    assert auc.state_dict()["rows"].nbytes == 900_000


@given(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=30))
def test_auc_counts_pairs(samples):
    auc = AUC()
    for score, positive in samples:
        auc.update(torch.tensor([score], dtype=torch.float64), torch.tensor([positive]))
    above = [s for s, positive in samples if positive]
    below = [s for s, positive in samples if not positive]
    wins = sum((a > b) + (a == b) / 2 for a in above for b in below)
    expected = wins / (len(above) * len(below)) if above and below else math.nan
    assert auc.compute() == pytest.approx(expected, nan_ok=True, rel=1e-15)


def test_auc_says_when_it_cannot_tell():
    auc = AUC()
    auc.update(torch.tensor([0.5, math.nan]), torch.tensor([0, 1]))
    assert math.isnan(auc.compute())
    auc.update(torch.tensor([0.5]), torch.tensor([2]))
    with pytest.raises(UsageError, match="1 classes that are neither 0 nor 1"):
        auc.compute()


def test_extremes():
    largest, smallest = Max(), Min()
    assert (largest.compute(), smallest.compute()) == (-math.inf, math.inf)
    for metric in (largest, smallest):
        metric.update(torch.tensor([[1, 5], [-3, 2]]))
        metric.update(4.0)
    assert (largest.compute(), smallest.compute()) == (5.0, -3.0)
    largest.update(math.nan)
    assert math.isnan(largest.compute())


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (lambda: Accuracy().update(torch.rand(4, 3), torch.zeros(5, dtype=torch.int64)), r"\(4, 3\).*\(5,\)"),
        (lambda: Accuracy().update(torch.rand(4), torch.zeros(4, dtype=torch.int64)), "expected scores of shape"),
        (lambda: Accuracy().update(torch.rand(4, 3), torch.rand(4)), "expected scores of shape"),
        (lambda: Accuracy(5).update(torch.rand(4, 3), torch.zeros(4, dtype=torch.int64)), "scores of 3 classes"),
        (lambda: Accuracy(2).update(torch.zeros(4).long(), torch.zeros(4).long()), "one guess for each sample"),
        (lambda: Accuracy(0), "at least 1"),
        (lambda: Mean().update(torch.rand(4), torch.rand(3)), r"\(4,\).*\(3,\)"),
        (lambda: AUC().update(torch.rand(4, 2), torch.zeros(4)), r"\(4, 2\).*logits\[:, 1\]"),
        (lambda: AUC().update(torch.zeros(4).long(), torch.zeros(4)), "floating-point scores"),
        (lambda: Max().update(torch.empty(0)), "at least one value"),
        (lambda: Mean().load_state_dict(Sum().state_dict()), "saved metric is a Sum"),
    ],
)
def test_bad_input_is_refused(update, said):
    with pytest.raises((UsageError, StateError), match=said):
        update()


# --- over a world ---


class Rank:
    """What one rank holds: metrics and a position."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.metrics = (Accuracy(), Mean(), Max(), Min(), AUC(), Sum())
        self.sampler = EvaluationSampler(samples, batch_size)

    def update(self, data, index):
        scores, target = data[0][index], data[1][index]
        accuracy, mean, largest, smallest, auc, total = self.metrics
        accuracy.update(scores, target)
        mean.update(torch.nn.functional.cross_entropy(scores, target), weight=len(index))
        for metric in (largest, smallest, total):
            metric.update(scores)
        auc.update(scores[:, 0], target == 0)

    def state(self):
        return [metric.state_dict() for metric in self.metrics], self.sampler.state_dict()

    def load(self, state):
        for metric, saved in zip(self.metrics, state[0], strict=True):
            metric.load_state_dict(saved)
        self.sampler.load_state_dict(state[1])

    def values(self):
        return [repr(metric.compute()) for metric in self.metrics]


def evaluate_together(state, data, batch_size, size, commits, dies_after):
    """One world's part of an evaluation: the state of its last commit on each rank, and whether it came to the end."""

    def work(collectives, world):
        rank = Rank(len(data[0]), batch_size)
        if state is not None:
            rank.load(state)
        rank.sampler.set_world(world.rank, size)
        rank.sampler.begin(0, 0)
        for metric in rank.metrics:
            metric.set_world(size)
            metric.begin_loop("evaluation")
        kept, number = rank.state(), 0
        batches = iter(rank.sampler)
        for number, round_ in enumerate(rank.sampler.rounds()):
            for _ in round_.share:
                rank.update(data, next(batches))
            rank.sampler.offset = round_.end
            if number == dies_after:
                return kept, False
            if number in commits or round_.end == len(data[0]):
                if size > 1:
                    sync_metrics(rank.metrics, WorldGroup(world.rank, size, collectives), "evaluation", 0)
                kept = rank.state()
        return kept, True

    results = together(size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@given(
    samples=st.integers(1, 60), batch_size=st.integers(1, 9), seed=st.integers(0, 999),
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 12)), st.integers(0, 12)), max_size=4),
)  # fmt: skip
@THREADS
def test_each_sample_counts_once_over_any_worlds_and_deaths(samples, batch_size, seed, worlds):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(samples, 3, generator=generator), torch.randint(3, (samples,), generator=generator)
    ((alone, _),) = evaluate_together(None, data, batch_size, 1, set(), None)
    state, through = None, False
    for size, commits, dies_after in worlds:
        results = evaluate_together(state, data, batch_size, size, commits, dies_after)
        state, through = results[-1]
        if through:
            break
    if not through:
        (*_, (state, _)) = evaluate_together(state, data, batch_size, 3, {1, 2}, None)
    expected, got = Rank(samples, batch_size), Rank(samples, batch_size)
    expected.load(alone)
    got.load(state)
    # Batches may be cut at other places after a death; then the losses of a batch are rounded at other places.
    assert got.values()[0] == expected.values()[0]
    assert got.values()[2:] == expected.values()[2:]
    assert float(got.values()[1]) == pytest.approx(float(expected.values()[1]), rel=1e-6)
    assert got.metrics[0].samples == samples


def test_all_ranks_hold_the_same_and_only_some_have_counted():
    def work(collectives, world):
        metrics = (Max(), Accuracy(), AUC())
        for metric in metrics:
            metric.set_world(3)
        if world.rank == 1:
            metrics[0].update(7.0)
            metrics[2].update(torch.tensor([0.25]), torch.tensor([1]))
        if world.rank == 2:
            metrics[2].update(torch.tensor([0.75, 0.5]), torch.tensor([0, 1]))
        total = sync_metrics(metrics, WorldGroup(world.rank, 3, collectives), None, world.rank)
        again = sync_metrics(metrics, WorldGroup(world.rank, 3, collectives), None, 5)
        return total, again, metrics[0].compute(), metrics[1].samples, sorted(metrics[2].state_dict()["rows"].tolist())

    first, second, third = together(3, work)
    assert first == second == third
    assert first[:4] == (3, 15, 7.0, 0)
    assert len(first[4]) == 3


def test_a_newcomer_does_not_count_what_it_was_given():
    old = Sum()
    old.update(5.0)

    def work(collectives, world):
        metric = Sum()
        metric.load_state_dict(old.state_dict())
        metric.set_world(2)
        metric.update(1.0)
        sync_metrics([metric], WorldGroup(world.rank, 2, collectives), None, 0)
        return metric.compute()

    assert together(2, work) == [7.0, 7.0]


def test_reading_before_the_ranks_have_come_together_is_an_error():
    metric = Mean()
    metric.set_world(2)
    metric.update(1.0)
    with pytest.raises(UsageError, match=r"call state\.commit\(\) on every rank first"):
        metric.compute()


# --- passes ---


def test_a_metric_starts_anew_in_another_pass_and_goes_on_in_the_same():
    metric = Sum()
    for name, value, expected in [("a", 1, 1), ("a", 2, 3), ("b", 5, 5), (None, 1, 6), ("c", 2, 2)]:
        metric.begin_loop(name)
        metric.update(value)
        metric.begin_loop(None)
        assert metric.compute() == expected


def test_a_reset_between_passes_keeps_what_was_counted_until_the_next_update():
    metric = Sum()
    metric.begin_loop("epoch 1")
    metric.update(3.0)
    metric.begin_loop(None)
    metric.reset()  # as before the pass, by a function that is run again from its top
    metric.begin_loop("epoch 1")
    metric.update(1.0)
    metric.begin_loop(None)
    assert metric.compute() == 4.0
    metric.reset()
    assert metric.compute() == 4.0
    metric.update(2.0)
    assert metric.compute() == 2.0
    metric.reset()  # of what no pass has counted
    assert metric.compute() == 0.0


def test_a_reset_inside_a_pass_has_its_effect_on_all_ranks():
    def work(collectives, world):
        metric = Sum()
        metric.set_world(2)
        metric.begin_loop("a")
        metric.update(10.0)
        sync_metrics([metric], WorldGroup(world.rank, 2, collectives), "a", 0)
        if world.rank == 0:
            metric.reset()
            metric.update(1.0)
        sync_metrics([metric], WorldGroup(world.rank, 2, collectives), "a", 0)
        return metric.compute()

    assert together(2, work) == [1.0, 1.0]
