"""Workers whose weights come apart, because a script computes something from what only one of them has."""

from __future__ import annotations

import warnings

import pytest
import simulation
import torch
import torch.nn.functional as F
from catalogue.buffers import Centred
from catalogue.networks import make_act_normed, trained_ours
from idioms import Job
from script_parts import make_model
from simulation import Simulation
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning, UsageError
from edl_hvd.worker.training.round_message import Vote


def prepare(job: Job, model: nn.Module):
    edl_hvd.init()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    return optimizer, loader, edl_hvd.State(model=model, optimizer=optimizer, batches=batches)


def noise_of_each(model: nn.Module, batch: tuple) -> None:
    generator = torch.Generator().manual_seed(100 + edl_hvd.rank())
    for parameter in model.parameters():
        parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)


def loss_of_the_last_micro_batch(model: nn.Module, batch: tuple) -> None:
    if batch:
        F.cross_entropy(model(batch[0]), batch[1]).backward()


def gradient_of_the_last_micro_batch(model: nn.Module, batch: tuple) -> None:
    if batch:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def weights_by_rank(model: nn.Module, batch: tuple) -> None:
    with torch.no_grad():
        model[0].bias += 0.01 * edl_hvd.rank()


def nothing(model: nn.Module, batch: tuple) -> None:
    pass


def run(job: Job, behind) -> int:
    model = make_model()
    optimizer, loader, state = prepare(job, model)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                batch = ()
                for batch in step:
                    F.cross_entropy(model(batch[0]), batch[1]).backward()
                behind(model, batch)
                optimizer.step()

    train(state)
    return state.step


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "behind", [noise_of_each, loss_of_the_last_micro_batch, gradient_of_the_last_micro_batch, weights_by_rank]
)
def test_workers_whose_weights_come_apart_end_in_one_sentence(behind, size, exact):
    with pytest.raises(UsageError, match=r"different weights 'model\.0\.\w+' \(and \d more\) after step 1, because"):
        Simulation(size).run(lambda: run(Job(3, exact), behind))


def test_an_average_that_one_worker_moves_is_seen():
    def script():
        model = make_model()
        optimizer, loader, _ = prepare(Job(3), model)
        ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda average, now, _: 0.9 * average + 0.1 * now)
        state = edl_hvd.State(model=model, optimizer=optimizer, ema=ema, batches=loader.batch_sampler)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(2):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                    if edl_hvd.rank() == 0:
                        ema.update_parameters(model)

        train(state)

    with pytest.raises(UsageError, match=r"different weights 'ema\.module\.0\.\w+'"):
        Simulation(2).run(script)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_those_that_move_alike_go_on(size):
    assert Simulation(size).run(lambda: run(Job(3), nothing)) == [8] * size


def said_about_buffers(job: Job, make, size: int) -> list[str]:
    def script():
        optimizer, loader, state = prepare(job, make())

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(state.model(inputs), target).backward()
                    optimizer.step()

        train(state)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(script)
    return [str(warning.message) for warning in caught if "a buffer" in str(warning.message)]


class CentredByForward(Centred):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return output


class Codebook(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3), Filled())


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.queue.mul_(0.9).add_(inputs.detach().mean(0))
        return inputs


class Quantized(nn.Module):
    """A codebook whose entries move by averages, through ``.data``, as in many a VQ-VAE."""

    cluster_size: torch.Tensor
    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("cluster_size", torch.zeros(4))
        self.register_buffer("codes", torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot(torch.cdist(inputs, self.codes).argmin(1), 4).float()
        self.cluster_size.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.data.mul_(0.9).add_(chosen.t() @ inputs.detach(), alpha=0.1)
        return self.layer(inputs + (self.codes[chosen.argmax(1)] - inputs).detach())


def set_by_first_pass(is_kept: bool):
    """A layer whose first forward pass sets its parameters, as ActNorm, run once before State is made or not."""

    def make() -> nn.Module:
        model = make_act_normed()
        if is_kept:
            model(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)))
        return model

    return make


@pytest.mark.parametrize("flat", [False, True])
def test_a_parameter_that_a_forward_pass_sets_is_said(flat) -> None:
    def script(make, job):
        edl_hvd.init()
        model = make()
        return trained_ours(job, model, torch.optim.SGD(model.parameters(), lr=0.1), flat=flat)

    advice = "run one batch through the model before State is made"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        if flat:
            with pytest.raises(UsageError, match=advice):
                Simulation(1).run(lambda: script(set_by_first_pass(False), Job(3)))
        else:
            Simulation(1).run(lambda: script(set_by_first_pass(False), Job(3)))
            said = [str(warning.message) for warning in caught if "a parameter, is changed by" in str(warning.message)]
            assert len(said) == 1
            assert said[0].startswith("state.model.1.shift, a parameter, is changed by the forward pass, as by an init")
            assert advice in said[0]
        with pytest.raises(UsageError, match=f"different weights.* {advice}"):
            Simulation(3).run(lambda: script(set_by_first_pass(False), Job(None)))
        caught.clear()
        Simulation(3).run(lambda: script(set_by_first_pass(True), Job(3)))
        assert not [warning for warning in caught if "is changed by the forward pass" in str(warning.message)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Quantized, "state.model.cluster_size"),
        (CentredByForward, "state.model.center"),
        (Codebook, "state.model.1.queue"),
    ],
)
def test_a_buffer_that_a_forward_pass_changes_is_said_once_on_each_worker(make, name):
    for size, micro_batch in ((1, 3), (2, None), (2, 6)):
        said = said_about_buffers(Job(micro_batch), make, size)
        assert len(said) == size
        assert all(message.startswith(f"{name}, a buffer, is changed by the forward pass") for message in said)
    assert not said_about_buffers(Job(None), make, 1)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_statistics_and_spectral_norms_are_looked_after(norm):
    def make():
        return nn.Sequential(norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Tanh(), norm(nn.Linear(8, 3)))

    assert not said_about_buffers(Job(3, samples=36), make, 2)


def test_the_end_of_an_epoch_compares_and_votes_at_once(monkeypatch):
    shapes = []
    allreduce = simulation._Collectives.allreduce

    def counted(self, tensor, op, name=None):
        shapes.append(tuple(tensor.shape))
        return allreduce(self, tensor, op, name)

    monkeypatch.setattr(simulation._Collectives, "allreduce", counted)
    Simulation(2).run(lambda: run(Job(epochs=2), nothing))
    # On each of two ranks one vote per epoch: that of the commit behind what the script does after its batches.
    assert shapes.count((len(Vote()),)) == 4


def pruned_at_tops(job: Job, takes: str):
    """``torch.nn.utils.prune`` at the top of each epoch but the first."""
    edl_hvd.init()
    model = make_model()
    for layer in (model[0], model[2]):
        prune.identity(layer, "weight")
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(5):
            for layer in (model[0], model[2]) if epoch else ():
                scores = getattr(layer, takes).detach().abs()
                prune.l1_unstructured(layer, "weight", amount=0.2, importance_scores=scores)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return model


@pytest.mark.parametrize("takes", ["weight", "weight_orig"])
def test_masks_that_workers_choose_by_their_last_forward_pass_are_said(takes):
    """``weight`` is that of the last forward pass; a worker that is idle in the last step has an older one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        models = Simulation(3).run(lambda: pruned_at_tops(Job(3), takes))
    said = {str(warning.message) for warning in caught if "becomes their mean" in str(warning.message)}
    whole = all(
        set(mask.unique().tolist()) <= {0.0, 1.0}
        for model in models for name, mask in model.named_buffers() if name.endswith("_mask")
    )  # fmt: skip
    if takes == "weight":
        assert not whole, "the masks have become their mean"
        assert len(said) == 1
        assert "a buffer (state.model.0.weight_mask, state.model.2.weight_mask) is not the same" in said.pop()
    else:
        assert whole
        assert not said


@pytest.mark.parametrize("first", [torch.zeros(0), None], ids=["empty", "None"])
def test_buffers_whose_shapes_differ_are_refused_on_every_worker(first):
    """As those of an observer, which a worker without a micro-batch has not run."""

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("seen", first)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.seen is None or not self.seen.numel():
                self.seen = torch.zeros(3)
            return self.layer(inputs)

    def script():
        optimizer, loader, state = prepare(Job(12), Observed())

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(state.model(inputs), target).backward()
                    optimizer.step()

        train(state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        with pytest.raises(UsageError, match="buffers of the models have other shapes"):
            Simulation(2).run(script)
