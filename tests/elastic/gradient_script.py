"""Prints, for every step of an epoch, how far the world's gradient is from that of one process with the whole batch."""

import copy
import sys

import quick_start  # noqa: F401

# isort: split
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd

torch.set_num_threads(1)
edl_hvd.init()
micro_batch = int(sys.argv[1]) or None
torch.manual_seed(0)
inputs, target = torch.randn(43, 6).double(), torch.randint(0, 3, (43,))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
batches = edl_hvd.ElasticBatchSampler(43, global_batch=10, micro_batch=micro_batch)
order = [i for batch in batches for i in batch]
loader = DataLoader(TensorDataset(inputs, target), batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
whole = copy.deepcopy(model)


@edl_hvd.elastic
def train(state):
    for x, y in state.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if optimizer.at_boundary:
            whole.load_state_dict(model.state_dict())
            whole.zero_grad()
            of_step = order[state.samples : state.samples + 10]
            nn.functional.cross_entropy(whole(inputs[of_step]), target[of_step]).backward()
            ours = torch.cat([p.grad.flatten() for p in model.parameters()])
            theirs = torch.cat([p.grad.flatten() for p in whole.parameters()])
            # One write per line: the launcher may otherwise mix the lines of two workers.
            sys.stdout.write(f"error={((ours - theirs).norm() / theirs.norm()).item()} rank={edl_hvd.rank()}\n")
        optimizer.step()


train(state)
