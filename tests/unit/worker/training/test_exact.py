"""The same bits for any number of workers."""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_world import Turns
from lamb import LAMB
from torch import nn

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.worker.codec import encode
from edl_hvd.worker.training.alike import check_same_numerics, numerics_fingerprint

SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 53, 24, 3  # three steps an epoch: eight micro-batches twice, then two, one short


class Net(nn.Module):
    """Every kind of layer that depends on who computes what, and a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.cumulative = nn.BatchNorm1d(24, momentum=None)
        self.instance = nn.InstanceNorm2d(6, track_running_stats=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(24, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.instance(self.norm(self.convolution(images)).relu())
        return self.head(self.drop(self.cumulative(hidden.flatten(1))))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 2, 4, 4, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randint(0, 3, (SAMPLES,), generator=generator))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lamb": lambda parameters: LAMB(parameters, lr=0.01),
}


class Trainee:
    """What one rank has."""

    def __init__(self, optimizer: str = "sgd", exact: bool = True, half: bool = False, **sampler: Any) -> None:
        torch.manual_seed(1)
        self.half = half
        self.model = Net().to(memory_format=torch.channels_last)
        self.optimizer = edl_hvd.DistributedOptimizer(
            OPTIMIZERS[optimizer](self.model.parameters()), self.model.named_parameters(), exact=exact
        )
        sizes = sampler or {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
        self.batches = edl_hvd.ElasticBatchSampler(SAMPLES, seed=5, **sizes)
        self.loader = torch.utils.data.DataLoader(data(), batch_sampler=self.batches)
        self.state = edl_hvd.State(model=self.model, optimizer=self.optimizer, batches=self.batches)

    def train(self, rank: int, size: int, steps: int, loss: Callable[[Any, Any], Any] | None = None) -> None:
        """So many steps, from where the state is."""
        self.batches.set_world(rank, size)
        until = self.state.step + steps
        while True:
            for images, target in self.state.batches(self.loader):
                self.optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                    output = self.model(images)
                (loss or nn.functional.cross_entropy)(output.float(), target).backward()
                self.optimizer.step()
                if self.state.step == until - 1 and self.optimizer.at_boundary:
                    break
            if self.state.step == until:
                return
            self.state._runtime.store.epoch += 1

    def digest(self) -> str:
        """Of every parameter, buffer and optimizer state."""
        digest = hashlib.sha256()
        for part in (self.model.state_dict(), self.optimizer.state_dict()):
            plain, tensors = encode(part, "")
            digest.update(repr(plain).encode())
            for name, tensor in sorted(tensors.items()):
                digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def trained(worlds: list[tuple[int, int]], **options: Any) -> set[str]:
    """The digests of all ranks after a sequence of worlds, each a number of ranks and of steps."""
    trainees = [Trainee(**options)]
    for size, steps in worlds:
        plain, tensors = copy.deepcopy(trainees[0].state._runtime.store.live(0))
        trainees = [Trainee(**options) for _ in range(size)]
        for trainee in trainees:
            trainee.state._runtime.store.load(plain, tensors)
        Turns(size).run(lambda rank, present=trainees, steps=steps: present[rank].train(rank, len(present), steps))
    return {trainee.digest() for trainee in trainees}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_workers_ends_with_the_same_bits(optimizer, half):
    digests = [trained([(size, 5)], optimizer=optimizer, half=half) for size in range(1, 9)]
    assert set.union(*digests) == digests[0]


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_worlds_ends_with_the_same_bits(seed):
    dice = random.Random(seed)
    steps = [dice.randint(1, 3) for _ in range(5)]
    assert trained([(dice.randint(1, 8), count) for count in steps]) == trained([(1, sum(steps))])


def test_without_it_the_bits_differ():
    assert len(set.union(*(trained([(size, 5)], exact=False) for size in (1, 2, 3)))) > 1


class Linear(Trainee):
    """One layer without bias, whose gradients a test chooses: the loss is the sum of weight times coefficient."""

    def __init__(self, coefficients: list[float], scaler: Any = None) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = edl_hvd.DistributedOptimizer(sgd, self.model.named_parameters(), exact=True)
        count = len(coefficients)
        self.batches = edl_hvd.ElasticBatchSampler(count, global_batch=count, micro_batch=1, shuffle=False)
        self.loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.tensor(coefficients)), batch_sampler=self.batches
        )
        kept = {} if scaler is None else {"scaler": scaler}
        self.scaler = scaler
        self.state = edl_hvd.State(model=self.model, optimizer=self.optimizer, batches=self.batches, **kept)

    def step(self, rank: int, size: int) -> float:
        """The weight after one step: minus the mean of the coefficients."""
        self.batches.set_world(rank, size)
        for (coefficient,) in self.state.batches(self.loader):
            self.optimizer.zero_grad()
            loss = (self.model.weight * coefficient).sum()
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return self.model.weight.item()


def weights(coefficients: list[float], size: int, **options: Any) -> list[float]:
    return Turns(size).run(lambda rank: Linear(coefficients, **options).step(rank, size))


TINY = 2.0**-149  # the smallest positive number of single precision
CANCELLING = [1.0, 2.0**-30, -1.0, 3.0, -3.0, 2.0**-40, 5.0, -5.0]


@pytest.mark.parametrize(
    "coefficients",
    [
        [0.0] * 8,
        [TINY] * 8,
        [TINY, 0.0, 1.0, -1.0, 3 * TINY, 0.0],
        [2.0**100, TINY, -(2.0**100), 1.0],
        CANCELLING,
    ],
    ids=["zeros", "denormal", "mixed", "far-apart", "cancelling"],
)
@pytest.mark.filterwarnings("ignore::edl_hvd.errors.EdlHvdWarning")
def test_gradients_of_any_size_sum_alike(coefficients):
    found = {weight for size in range(1, 9) for weight in weights(coefficients, size)}
    assert len(found) == 1
    if coefficients == [TINY] * 8:
        assert found == {-TINY}, "nothing is flushed to zero"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_that_is_no_number_is_an_error_on_every_rank(bad, size):
    seen = []

    def one(rank: int) -> None:
        with pytest.raises(UsageError, match=r"'model.weight'.*is infinite or not a number"):
            Linear([1.0, 2.0, bad, 3.0]).step(rank, size)
        seen.append(rank)

    Turns(size).run(one)
    assert len(seen) == size


def test_a_sum_that_overflows_where_no_element_does_is_no_error():
    model = nn.Linear(4, 1, bias=False)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), exact=True)

    def one(rank: int) -> list[float]:
        (model.weight * torch.tensor([3e38, 3e38, 1.0, 1.0])).sum().backward()
        return model.weight.grad.flatten().tolist()

    (gradient,) = Turns(1).run(one)
    assert gradient == pytest.approx([3e38, 3e38, 1.0, 1.0])
    assert optimizer.reduction.rounds == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_scaler_leaves_an_infinite_step_out_on_every_rank_alike(size):
    def one(rank: int) -> tuple[float, float]:
        scaler = edl_hvd.GradScaler("cpu", init_scale=4.0)
        return Linear([1.0, math.inf, 2.0, 3.0], scaler).step(rank, size), scaler.get_scale()

    assert set(Turns(size).run(one)) == {(0.0, 2.0)}


@pytest.mark.parametrize(
    "sampler",
    [{"global_batch": 24}, {"policy": edl_hvd.WorkerBatch(6, micro_batch=3)}],
    ids=["even split", "worker batch"],
)
def test_only_the_same_micro_batches_in_every_world_can_be_exact(sampler):
    trainee = Trainee(**sampler)
    with pytest.raises(UsageError, match=r"expected all of them, and ElasticBatchSampler.*micro_batch"):
        Turns(1).run(lambda rank: trainee.train(rank, 1, 1))


def test_one_optimizer_that_is_exact_and_one_that_is_not_are_refused():
    trainee = Trainee()
    other = edl_hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    trainee.state = edl_hvd.State(
        model=trainee.model, optimizer=trainee.optimizer, other=other, batches=trainee.batches
    )
    with pytest.raises(UsageError, match="1 of the 2 optimizers in State have exact=True"):
        Turns(1).run(lambda rank: trainee.train(rank, 1, 1))


def test_statistics_over_the_world_are_refused():
    trainee = Trainee()
    trainee.model.norm = nn.SyncBatchNorm(6)
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        Turns(1).run(lambda rank: trainee.train(rank, 1, 1))


def test_a_second_backward_in_one_batch_is_refused():
    def twice(output: Any, target: Any) -> Any:
        nn.functional.cross_entropy(output, target).backward(retain_graph=True)
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(UsageError, match=r"a second time in one body.*state\.steps"):
        Turns(2).run(lambda rank: Trainee().train(rank, 2, 1, twice))


def test_one_worker_keeps_the_statistics_that_plain_torch_keeps():
    trainee = Trainee()
    plain = copy.deepcopy(trainee.model)
    before = copy.deepcopy(trainee.model.state_dict())
    Turns(1).run(lambda rank: trainee.train(rank, 1, 1))
    images = data().tensors[0]
    sampler = edl_hvd.ElasticBatchSampler(SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=5)
    for micro_batch in list(sampler)[: GLOBAL_BATCH // MICRO_BATCH]:
        plain(images[micro_batch])
    for name, value in plain.state_dict().items():
        if "running" in name or "tracked" in name:
            torch.testing.assert_close(trainee.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
            assert not torch.equal(value, before[name]) or name == "instance.num_batches_tracked"


def test_workers_that_compute_otherwise_are_refused():
    own = Turns(1).run(lambda rank: numerics_fingerprint(edl_hvd.device()))[0]
    Turns(1).run(lambda rank: check_same_numerics(numerics_fingerprint(edl_hvd.device()), own))
    other = {**own, "device": "another chip"}
    with pytest.raises(UsageError, match=r"device: .* instead of 'another chip'"):
        Turns(1).run(lambda rank: check_same_numerics(numerics_fingerprint(edl_hvd.device()), other))


def test_a_batch_that_the_script_gives_up_leaves_the_statistics_as_they_were():
    trainee = Trainee()
    before = copy.deepcopy(trainee.model.state_dict())

    def one(rank: int) -> None:
        trainee.batches.set_world(rank, 1)
        for images, target in trainee.state.batches(trainee.loader):
            nn.functional.cross_entropy(trainee.model(images), target).backward()
            break

    Turns(1).run(one)
    for name, value in trainee.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_without_state_batches_the_gradient_is_the_mean_over_the_ranks():
    def one(rank: int) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), exact=True)
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            (weight * float(rank) * factor).sum().backward()
            optimizer.step()
        return weight.item()

    assert Turns(3).run(one) == [-3.0] * 3
