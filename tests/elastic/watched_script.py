"""Trains until a checkpoint is listed. Arguments: a folder, the interval of checkpoints, the rank that drifts or -1."""

import sys
import time
from pathlib import Path

import quick_start  # noqa: F401

# isort: split
import torch

import edl_hvd
from edl_hvd.checkpoint import steps
from edl_hvd.storage import open_storage

folder, interval, drifting_rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
storage = open_storage(str(folder / "checkpoints"))

edl_hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
batches = edl_hvd.ElasticBatchSampler(32, global_batch=8)
loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)


@edl_hvd.elastic(checkpoint=folder / "checkpoints", checkpoint_every=interval)
def train(state: edl_hvd.State) -> None:
    for _ in state.epochs(10**6):
        if edl_hvd.allreduce(torch.tensor(len(steps(storage))), op="min") > 0:
            return
        for inputs in state.batches(loader):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if state.step == 2 and edl_hvd.rank() == drifting_rank:
                model.weight.data[0, 0] += 1e-6  # as a bit that flips in memory
            time.sleep(0.02)


(folder / f"began-{edl_hvd.rank()}").write_text(str(time.time()))
train(state)
