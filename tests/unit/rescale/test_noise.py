"""How noisy the gradient is: the arithmetic, and its measurement in simulated worlds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from fake_world import alone
from simulation import Simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.events import read_events
from edl_hvd.rescale.noise import Noise, Observation
from edl_hvd.rescale.partition import partition
from edl_hvd.rescale.policy import WorkerBatch
from edl_hvd.worker.training.noise import _square_of

FEATURES = 5


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, FEATURES, generator=generator).double(), torch.randn(samples, 1, generator=generator)


def loss_of(model: nn.Module, first: int, last: int, samples: int) -> torch.Tensor:
    inputs, target = data(samples)
    return ((model(inputs[first:last]) - target[first:last]) ** 2).mean()


def observe(size: int, samples: int, micro_batch: int | None, loss_scale: float = 1.0):
    """What a step over all samples shows, the same on every rank."""

    def script():
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, 1).double()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), measure_noise=True)
        full = samples if micro_batch is None else -(-samples // micro_batch) * micro_batch
        batches = edl_hvd.ElasticBatchSampler(samples, global_batch=full, micro_batch=micro_batch, shuffle=False)
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
        loader = DataLoader(range(samples), batch_sampler=batches)
        seen = []

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for step in state.steps(loader):
                    optimizer.reduction.noise.loss_scale = loss_scale
                    for part in step:
                        (loss_scale * loss_of(model, int(part[0]), int(part[-1]) + 1, samples)).backward()
                    seen.append(optimizer.reduction.noise.observation)

        train(state)
        return seen[0]

    found = Simulation(size).run(script)
    assert len(set(found)) == 1, "the ranks observe different things"
    return found[0]


def square_of(first: int, last: int, samples: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1).double()
    loss_of(model, first, last, samples).backward()
    return sum(float(parameter.grad.square().sum()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "samples", "micro_batch"), [(1, 12, 4), (2, 12, None), (2, 12, 3), (3, 13, None), (3, 13, 2), (4, 3, None)]
)
def test_a_step_is_observed_as_its_definition_says(size, samples, micro_batch):
    """Unequal shares, micro-batches of unequal size, a rank that was dealt nothing."""
    firsts = [
        partition(samples, rank, size, micro_batch)[0]
        for rank in range(size)
        if partition(samples, rank, size, micro_batch)
    ]
    seen = observe(size, samples, micro_batch)
    assert seen.small_square == pytest.approx(sum(square_of(*part, samples) for part in firsts) / len(firsts), rel=1e-6)
    harmonic = len(firsts) / sum(1 / (last - first) for first, last in firsts)
    assert seen.small_samples == pytest.approx(harmonic)
    assert seen.large_square == pytest.approx(square_of(0, samples, samples), rel=1e-6)
    assert seen.large_samples == samples


def test_a_scaled_loss_is_taken_into_account():
    plain, scaled = observe(2, 12, 3), observe(2, 12, 3, loss_scale=1024.0)
    assert scaled.small_square == pytest.approx(plain.small_square)
    assert scaled.large_square == pytest.approx(plain.large_square)


def test_one_micro_batch_alone_tells_nothing():
    seen = observe(1, 12, None)
    assert not seen.is_usable
    assert Noise().after(seen).samples is None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_overflowed_is_left_out(value):
    noise = Noise(variance=1.0, square=1.0, weight=0.5)
    assert noise.after(Observation(value, 4, 1.0, 8)) == noise
    assert noise.after(Observation(1.0, 4, value, 8)) == noise


def test_the_estimates_have_no_bias():
    """|∇F|² = 9 and tr(Σ) = 50, known exactly; three ranks of 2, 3 and 7 samples, a million steps.

    The estimates are linear in the squares, so the estimate from their means is the mean of the estimates.
    """
    generator = torch.Generator().manual_seed(0)
    shares = (2, 3, 7)
    truth = torch.tensor([3.0, 0.0])
    small = [
        truth + 5 * torch.randn(1_000_000, 2, generator=generator, dtype=torch.float64) / math.sqrt(share)
        for share in shares
    ]
    large = sum(share * part for share, part in zip(shares, small, strict=True)) / sum(shares)
    means = [float(part.square().sum(1).mean()) for part in (*small, large)]
    seen = Observation(sum(means[:3]) / 3, 3 / sum(1 / share for share in shares), means[3], sum(shares))
    assert seen.variance == pytest.approx(50, rel=0.005)
    assert seen.square == pytest.approx(9, rel=0.01)


def test_the_mean_is_corrected_for_where_it_began():
    noise = Noise().after(Observation(3.0, 4, 2.0, 8))
    assert noise.samples == pytest.approx(8.0)
    assert noise.weight == pytest.approx(0.001)


# -- AdaScale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "base_size"), [(4, 1), (8, 2), (6, 4), (1, 2)])
def test_the_gain_is_one_for_identical_gradients_and_the_scale_for_pure_noise(size, base_size):
    """The paper's identity; S = W / base_size, so the number of workers alone does not do."""
    policy = WorkerBatch(16, learning_rate="adascale", base_size=base_size)
    scale = policy.learning_rate_factor(size)
    assert scale == size / base_size
    identical = Noise().after(Observation(2.0, 16, 2.0, 16.0 * max(size, 2)))
    assert policy.adapted(scale, identical) == pytest.approx(1.0)
    # Of pure noise the square falls with the number of samples.
    pure = Noise().after(Observation(2.0, 16, 2.0 / max(size, 2), 16.0 * max(size, 2)))
    assert policy.adapted(scale, pure) == pytest.approx(scale)


def test_the_gain_of_a_known_problem():
    """σ² = 4 of a base batch, μ² = 1, S = 4: r = 5 / 2."""
    noise = Noise(variance=64.0, square=1.0, weight=1.0)
    assert WorkerBatch(16, learning_rate="adascale").adapted(4.0, noise) == pytest.approx(2.5)


def test_before_anything_was_measured_the_rate_is_not_raised():
    policy = WorkerBatch(16, learning_rate="adascale", base_size=2)
    assert policy.adapted(4.0, Noise()) == 1.0
    assert policy.adapted(0.5, Noise()) == 0.5


def trained(worker_batch: int, samples: int, epochs: int, rate: float = 0.02):
    """Least squares with noisy targets; the losses after each step, beside the sum of the gains up to there."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 20, generator=generator)
    truth = torch.randn(20, 1, generator=generator)
    target = inputs @ truth + 3.0 * torch.randn(samples, 1, generator=generator)
    torch.manual_seed(1)
    model = nn.Linear(20, 1)
    nn.init.zeros_(model.weight)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model.named_parameters())
    policy = WorkerBatch("auto", min=8, max=worker_batch, learning_rate="adascale")
    batches = edl_hvd.ElasticBatchSampler(samples, policy=policy)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    state._runtime.store.learning.worker_batch = worker_batch
    loader = DataLoader(TensorDataset(inputs, target), batch_sampler=batches)
    seen: list[tuple[float, float]] = []

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(epochs):
            for features, wanted in state.batches(loader):
                optimizer.zero_grad()
                ((model(features) - wanted) ** 2).mean().backward()
                optimizer.step()
                if optimizer.at_boundary:
                    with torch.no_grad():
                        excess = float(((model(inputs) - inputs @ truth) ** 2).mean())
                    seen.append((state.scale_invariant_steps + state.learning_rate_factor, excess))

    with alone():
        train(state)
    return state, seen


def test_four_times_the_batch_gets_as_far_in_as_many_scale_invariant_steps(monkeypatch):
    """Johnson et al. 2020, figure 1: over scale-invariant iterations the curves of all scales are one."""
    monkeypatch.setattr("edl_hvd.worker.training.tuning.EVERY_STEPS", 10**9)
    _, single = trained(8, 2048, epochs=1)
    state, fourfold = trained(32, 2048, epochs=3)
    assert len(single) == 256
    gains = [after[0] - before[0] for before, after in itertools.pairwise(fourfold)]
    assert 1.5 < sum(gains) / len(gains) < 4.0
    assert state.scale_invariant_steps == pytest.approx(fourfold[-1][0])
    for steps in (20, 40, 80, 160):
        alone_ = single[steps - 1][1]
        scaled = next(loss for count, loss in fourfold if count >= steps)
        assert scaled == pytest.approx(alone_, rel=0.35), f"after {steps} scale-invariant steps"
    reached = next(i for i, (count, _) in enumerate(fourfold) if count >= 160)
    assert reached < 110, "it took hardly fewer steps"


# -- in a job -------------------------------------------------------------------------------------------------------


def job(tmp_path, epochs: int, measure: bool = True, exact: bool = False, scaler=None, **sampler):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), measure_noise=measure, exact=exact
    )
    batches = edl_hvd.ElasticBatchSampler(64, **sampler)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    loader = DataLoader(TensorDataset(inputs), batch_sampler=batches)
    scaler = scaler or edl_hvd.GradScaler("cpu", enabled=False)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scaler=scaler)

    @edl_hvd.elastic(checkpoint=tmp_path / "checkpoints", events=tmp_path / "events")
    def train(state):
        for _ in state.epochs(epochs):
            for (features,) in state.batches(loader):
                optimizer.zero_grad()
                scaler.scale(((model(features) - 1) ** 2).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            if state.gradient_noise_scale is not None:
                state.report(noise=state.gradient_noise_scale)

    with alone():
        train(state)
    return state


def test_the_noise_is_measured_on_request_and_survives_in_checkpoints(tmp_path):
    whole = job(tmp_path / "whole", 4, global_batch=16, micro_batch=4)
    job(tmp_path / "parts", 2, global_batch=16, micro_batch=4)
    resumed = job(tmp_path / "parts", 4, global_batch=16, micro_batch=4)
    assert whole.gradient_noise_scale > 0
    assert resumed._runtime.store.learning == whole._runtime.store.learning
    assert resumed.scale_invariant_steps == 16
    metrics = [event["values"] for event in read_events(tmp_path / "whole" / "events") if event["event"] == "metrics"]
    assert [list(values) for values in metrics] == [["noise"]] * 4
    assert metrics[-1]["noise"] == whole.gradient_noise_scale


def test_an_exact_optimizer_measures_the_same(tmp_path):
    plain = job(tmp_path / "plain", 2, global_batch=16, micro_batch=4)
    exact = job(tmp_path / "exact", 2, exact=True, global_batch=16, micro_batch=4)
    assert exact.gradient_noise_scale == pytest.approx(plain.gradient_noise_scale, rel=1e-3)


def test_a_large_gradient_is_squared_without_loss():
    generator = torch.Generator().manual_seed(0)
    for gradient in (torch.randn(3000, 3000, generator=generator), torch.randn(2, 3, generator=generator).bfloat16()):
        exactly = float(gradient.double().square().sum())
        assert float(_square_of(gradient)) == pytest.approx(exactly, rel=1e-6)


def test_a_grad_scaler_does_not_show(tmp_path):
    plain = job(tmp_path / "plain", 2, global_batch=16, micro_batch=4)
    scaler = edl_hvd.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)  # grows twice on the way
    scaled = job(tmp_path / "scaled", 2, scaler=scaler, global_batch=16, micro_batch=4)
    assert scaler.get_scale() == 2.0**12
    assert scaled.gradient_noise_scale == pytest.approx(plain.gradient_noise_scale, rel=1e-3)


def test_without_a_request_nothing_is_measured(tmp_path):
    state = job(tmp_path, 1, measure=False, global_batch=16, micro_batch=4)
    assert state.gradient_noise_scale is None
    assert state.optimizer.reduction.noise is None


def test_a_checkpoint_from_before_noise_was_measured_is_read(tmp_path):
    state = job(tmp_path, 1, global_batch=16, micro_batch=4)
    plain, tensors = state._runtime.store.export()
    del plain["counters"]["learning"]
    state._runtime.store.load(plain, dict(tensors))
    assert state.step == 4
