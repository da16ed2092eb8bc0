"""A micro-batch that does not fit into the GPU's memory ends in one error that says what to change."""

from __future__ import annotations

import pytest
import torch
from fake_world import alone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import UsageError

TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB.\nSee more"


class Greedy(nn.Module):
    """Fails like a GPU of little memory, in the second step."""

    def __init__(self, most_samples: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.most_samples = most_samples
        self._calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if len(inputs) > self.most_samples and self._calls > 1:
            raise torch.cuda.OutOfMemoryError(TORCH_SAYS)
        return self.layer(inputs)


def run(most_samples: int, outside: bool = False, **sampler):
    model = Greedy(most_samples)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(96, **sampler)
    loader = DataLoader(TensorDataset(torch.ones(96, 2)), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(1):
            for (inputs,) in state.batches(loader):
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
            if outside:
                model(torch.ones(1000, 2))

    with alone():
        train(state)


@pytest.mark.parametrize(
    ("most", "sampler", "said"),
    [
        (16, {"global_batch": 32, "micro_batch": 32}, r"micro-batch of 32 samples \(micro_batch=32\).*micro_batch=16:"),
        (8, {"global_batch": 48}, r"micro-batch of 48 samples \(micro_batch is left out\).*micro_batch=24:"),
        (8, {"global_batch": 30, "micro_batch": 15}, r"micro-batch of 15 samples.*micro_batch=6:"),
        (8, {"policy": edl_hvd.WorkerBatch(24)}, r"micro-batch of 24 samples.*micro_batch=12:"),
        (3, {"policy": edl_hvd.WorkerBatch("auto", min=8, max=16)}, r"micro-batch of 4 samples.*micro_batch=2:"),
        (0, {"global_batch": 2, "micro_batch": 1}, r"a single sample does not fit.*checkpoint"),
    ],
)
def test_the_error_names_the_argument_and_half_of_its_value(most, sampler, said):
    with pytest.raises(UsageError, match=said) as caught:
        run(most, **sampler)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)


def test_what_it_recommends_works():
    run(16, global_batch=32, micro_batch=16)


def test_outside_of_a_micro_batch_torchs_own_error_stands():
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        run(96, outside=True, global_batch=32)
