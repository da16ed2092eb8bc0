"""One worker does not come to its end when ``edlrun`` is gone: it sleeps, or computes for ever.

Arguments: folder for the files ``worker-RANK``, which hold process ids; and what rank 1 does in its fourth step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd

folder, how = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
edl_hvd.init()
model = nn.Linear(2, 1)
optimizer = edl_hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
dataset = TensorDataset(torch.ones(4000, 2), torch.ones(4000, 1))
batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=4, micro_batch=2)
loader = DataLoader(dataset, batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    for _ in state.epochs(1000):
        for number, (inputs, targets) in enumerate(state.batches(loader)):
            if number == 3:
                written = folder / f"worker-{edl_hvd.rank()}"
                written.with_suffix(".part").write_text(str(os.getpid()))
                written.with_suffix(".part").rename(written)
                if edl_hvd.rank() == 1 and how == "sleeps":
                    time.sleep(100_000)
                while edl_hvd.rank() == 1 and how == "computes":
                    pass
            time.sleep(0.02)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


train(state)
