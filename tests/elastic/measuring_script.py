"""Trains some epochs, measures after each, and loses rank 0 in one of them. Argument: a folder."""

import os
import signal
import sys
import time
from pathlib import Path

import quick_start  # noqa: F401

# isort: split
import torch

import edl_hvd
from edl_hvd.checkpoint import steps
from edl_hvd.storage import open_storage

folder = Path(sys.argv[1])
storage = open_storage(str(folder / "checkpoints"))
ACCURACIES = [0.5, 0.9, 0.7, 0.6, 0.8]
DIES_IN_EPOCH = 2

edl_hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
batches = edl_hvd.ElasticBatchSampler(32, global_batch=8)
loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)


@edl_hvd.elastic(checkpoint=folder / "checkpoints", checkpoint_every="1 epoch", keep_newest=1, keep_best="accuracy:max")
def train(state: edl_hvd.State) -> None:
    for epoch in state.epochs(len(ACCURACIES)):
        for inputs in state.batches(loader):
            if epoch == DIES_IN_EPOCH and edl_hvd.rank() == 0 and not (folder / "died").exists():
                while state.step not in steps(storage):
                    time.sleep(0.01)  # the checkpoint of the epoch before is being written
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)
        if epoch == 0:
            state.report(samples_seen_first=state.samples)
        state.report(accuracy=ACCURACIES[epoch])


train(state)
