import copy

import pytest
import torch
from torch import nn
from worlds import RecordingCollectives, alone, rank_of

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.rescale.deal import deal
from edl_hvd.worker.training.reduction import MicroBatch

FEATURES, CLASSES = 6, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def make_data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def one_rank(model: nn.Module, rank: int, size: int, samples: int, micro_batch: int | None) -> RecordingCollectives:
    inputs, target = make_data(samples)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    parts = deal(samples, rank, size, micro_batch)
    with rank_of(rank, size) as collectives:
        for i, (first, last) in enumerate(parts):
            optimizer.reduction.begin(MicroBatch(last - first, samples, i == 0, i == len(parts) - 1))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[first:last]), target[first:last]).backward()
            optimizer.step()
        if not parts:
            optimizer.reduction.take_part(MicroBatch(0, samples, first=True, last=True))
    return collectives


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("samples", "micro_batch"), [(24, None), (24, 4), (23, 4), (23, None), (5, 2), (3, None)])
def test_the_worlds_gradient_is_that_of_the_whole_batch(size, samples, micro_batch):
    model = make_model()
    inputs, target = make_data(samples)
    whole = copy.deepcopy(model)
    nn.functional.cross_entropy(whole(inputs), target).backward()
    ranks = [one_rank(copy.deepcopy(model), rank, size, samples, micro_batch).parts for rank in range(size)]
    for name, parameter in whole.named_parameters():
        total = sum(parts[f"edl_hvd.gradient.{name}"] for parts in ranks)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-6, atol=1e-12)


def test_zero_grad_and_step_act_at_the_bounds_of_a_global_batch_only():
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, target = make_data(8)
    before = copy.deepcopy(model.state_dict())
    moved = []
    with rank_of(0, 1):
        for i in range(4):
            optimizer.reduction.begin(MicroBatch(2, 8, first=i == 0, last=i == 3))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[2 * i : 2 * i + 2]), target[2 * i : 2 * i + 2]).backward()
            optimizer.step()
            moved.append(not torch.equal(model.state_dict()["0.weight"], before["0.weight"]))
    assert moved == [False, False, False, True]


def test_the_learning_rate_factor_acts_inside_step_only():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with alone(), rank_of(0, 1):
        optimizer.reduction.begin(MicroBatch(1, 1, first=True, last=True))
        optimizer.reduction.learning_rate_factor = 4.0
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.6))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_parameter_that_this_loss_does_not_use_takes_part_with_zeros():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    with rank_of(0, 2) as collectives:
        optimizer.reduction.begin(MicroBatch(1, 2, first=True, last=True))
        used.sum().backward()
    assert collectives.parts["edl_hvd.gradient.parameter.1"].tolist() == [0.0, 0.0]


def test_a_script_without_batches_averages_over_the_workers():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with rank_of(1, 4) as collectives:
        parameter.sum().backward()
        optimizer.step()
        assert collectives.parts["edl_hvd.gradient.parameter.0"].tolist() == [0.25, 0.25]


def test_a_second_backward_in_one_batch_says_what_to_do():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
    with rank_of(0, 1):
        optimizer.reduction.begin(MicroBatch(1, 1, first=True, last=True))
        parameter.sum().backward()
        with pytest.raises(UsageError, match=r"gradient of 'weight' twice in one batch.*no_sync"):
            parameter.sum().backward()


def test_no_sync_accumulates_until_the_backward_after_it():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with rank_of(0, 1) as collectives:
        optimizer.reduction.begin(MicroBatch(1, 1, first=True, last=True))
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
        with alone(), rank_of(0, 1):
            if wrapped:
                assert edl_hvd.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer
                assert isinstance(optimizer, kind)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if wrapped:
                    edl_hvd.worker.process.current().collectives.parts.clear()
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name])
