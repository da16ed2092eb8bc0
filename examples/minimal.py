"""The smallest elastic script: a small network, trained on whatever workers there are.

python examples/minimal.py
edlrun -np 2 --min-np 1 --discover file:hosts.txt python examples/minimal.py
"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd

edl_hvd.init()
torch.set_num_threads(1)  # several workers share this machine
torch.manual_seed(0)
inputs = 4 * torch.rand(2048, 2) - 2
dataset = TensorDataset(inputs, torch.sin(2 * inputs[:, :1]) * inputs[:, 1:])

model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = edl_hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=256, micro_batch=64)
loader = DataLoader(dataset, batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())


@edl_hvd.elastic
def train(state):
    for epoch in state.epochs(20):
        for step in state.steps(loader):  # once per optimizer step, on every worker
            for x, y in step:  # this worker's micro-batches
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                state.loss.update(loss, weight=len(x))
                time.sleep(0.05)  # stands for the work of a larger model
            optimizer.step()
            optimizer.zero_grad()
        if edl_hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {state.loss.compute():.6f}, workers {edl_hvd.size()}", flush=True)


train(state)
