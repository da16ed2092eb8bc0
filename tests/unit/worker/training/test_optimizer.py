import copy

import pytest
import torch
from fake_world import alone, body_of, rank_of
from simulation import Simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.worker.training.micro_batch import MicroBatch

FEATURES, CLASSES = 6, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def make_data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: int, micro_batch: int | None) -> None:
    """One step of the present world over all samples."""
    inputs, target = make_data(samples)
    full = samples if micro_batch is None else -(-samples // micro_batch) * micro_batch
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=full, micro_batch=micro_batch, shuffle=False)
    loader = DataLoader(TensorDataset(inputs, target), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def run(state):
        for _ in state.epochs(1):
            for part, wanted in state.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(part), wanted).backward()
                optimizer.step()

    run(state)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("samples", "micro_batch"), [(24, None), (24, 4), (23, 4), (23, None), (5, 2), (3, None)])
@pytest.mark.filterwarnings("ignore::edl_hvd.errors.EdlHvdWarning")
def test_the_worlds_gradient_is_that_of_the_whole_batch(size, samples, micro_batch):
    inputs, target = make_data(samples)
    whole = make_model()
    nn.functional.cross_entropy(whole(inputs), target).backward()

    def script():
        model = make_model()
        train(model, edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)), samples, micro_batch)
        return [parameter.grad for parameter in model.parameters()]

    for gradients in Simulation(size).run(script):
        for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-12)


def test_step_acts_at_the_end_of_a_global_batch_only():
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, target = make_data(8)
    before = copy.deepcopy(model.state_dict())
    moved = []
    with rank_of(0, 1):
        for i in range(4):
            part = MicroBatch(2, 8, first=i == 0, last=i == 3)
            with body_of(optimizer, part):
                nn.functional.cross_entropy(model(inputs[2 * i : 2 * i + 2]), target[2 * i : 2 * i + 2]).backward()
                assert (model[0].weight.grad is None) == (i < 3)
                optimizer.step()
                moved.append(not torch.equal(model.state_dict()["0.weight"], before["0.weight"]))
                optimizer.zero_grad()
    assert moved == [False, False, False, True]


def test_step_refuses_arguments_that_a_repeated_step_would_not_have():
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    for more, options, given in ((), {"bs": 8}, "bs=…"), ((None, 8), {}, "8"):
        with pytest.raises(UsageError, match=rf"was given {given}; expected nothing but a closure.*param_groups"):
            optimizer.step(*more, **options)


def test_the_learning_rate_factor_acts_inside_step_only():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with alone(), rank_of(0, 1), body_of(optimizer, MicroBatch(1, 1, first=True, last=True)):
        optimizer.reduction.learning_rate_factor = 4.0
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.6))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_parameter_that_this_loss_does_not_use_keeps_no_gradient_and_is_not_sent():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    with rank_of(0, 2) as collectives, body_of(optimizer, MicroBatch(1, 2, first=True, last=True)):
        used.sum().backward()
    assert "edl_hvd.gradient.parameter.1" not in collectives.parts
    assert unused.grad is None


def test_a_script_without_batches_averages_over_the_workers():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with rank_of(1, 4) as collectives:
        parameter.sum().backward()
        optimizer.step()
        assert collectives.parts["edl_hvd.gradient.parameter.0"].tolist() == [0.25, 0.25]


def test_a_second_backward_in_one_body_says_what_to_do():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
    part = MicroBatch(1, 2, first=True, last=True)
    with rank_of(0, 1), body_of(optimizer, part, per_step=2):
        parameter.sum().backward()
        with pytest.raises(UsageError, match=r"gradient of 'weight' a second time in one body.*state\.steps"):
            parameter.sum().backward()


def test_no_sync_accumulates_until_the_backward_after_it():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with rank_of(0, 2) as collectives, body_of(optimizer, MicroBatch(1, 1, first=True, last=True)):
        with optimizer.no_sync():
            parameter.sum().backward()
        assert not collectives.parts
        parameter.sum().backward()
        assert collectives.parts["edl_hvd.gradient.parameter.0"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda o, m: edl_hvd.DistributedOptimizer(edl_hvd.DistributedOptimizer(o)), "wrap it once"),
        (lambda o, m: edl_hvd.DistributedOptimizer(o, list(m.named_parameters())[:1]), "names 1 of the optimizer's 4"),
        (
            lambda o, m: (torch.optim.lr_scheduler.StepLR(o, 1), edl_hvd.DistributedOptimizer(o)),
            "before it was wrapped",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_wrapped_is_refused(wrap, said):
    model = make_model()
    with pytest.raises(UsageError, match=said):
        wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_wrapping_changes_nothing_in_a_world_of_one(kind):
    inputs, target = make_data(8)
    ends = []
    for wrapped in (False, True):
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.01)
        with alone(), rank_of(0, 1) as collectives:
            if wrapped:
                assert edl_hvd.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer
                assert isinstance(optimizer, kind)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if wrapped:
                    collectives.parts.clear()
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name])
