"""A worker that seeds nothing, and prints what it draws before training. Rank 0 adds a slot, if the job is to grow."""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import edl_hvd

hosts, size = Path(sys.argv[1]), int(sys.argv[2])
edl_hvd.init()
training, validation = random_split(TensorDataset(torch.arange(40)), [30, 10])
drawn = {
    "split": validation.indices,
    "vocabulary": list({f"word {number}" for number in range(40)}),
    "torch": torch.rand(2).tolist(),
    "random": random.random(),
    "NumPy": numpy.random.rand(),
}
print(json.dumps({"worker": os.environ["EDL_HVD_DRIVER_WORKER"], "drawn": drawn}), flush=True)


model = torch.nn.Linear(1, 1)
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
batches = edl_hvd.ElasticBatchSampler(len(training), global_batch=6, micro_batch=1)
loader = DataLoader(training, batch_sampler=batches)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    hosts.write_text(f"localhost slots={size}\n")
    for _ in state.epochs(1_000):
        for step in state.steps(loader):
            optimizer.zero_grad()
            for (number,) in step:
                model(number[:, None] / 40).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
        if edl_hvd.size() == size:
            break


train(edl_hvd.State(model=model, optimizer=optimizer, batches=batches))
