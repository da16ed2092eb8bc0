"""Tells which place each worker is told before it trains, and in its worlds; the first rank 0 dies in the middle."""

import os
import signal
import sys
import time
from pathlib import Path

import quick_start  # noqa: F401

# isort: split
import torch

import edl_hvd

edl_hvd.init()
# One write per line: the launcher may otherwise mix the lines of two workers.
sys.stdout.write(f"assigned {edl_hvd.rank()} of {edl_hvd.size()}, {edl_hvd.local_size()} on this host\n")
died = Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = edl_hvd.State(model=model, optimizer=optimizer, count=0)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    started_s = time.monotonic()
    # Until the one that comes back is a member.
    while not died.exists() or edl_hvd.size() < 3 or state.count < 4:
        assert time.monotonic() - started_s < 120
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.count += 1
        state.commit()
        if state.count == 2 and edl_hvd.rank() == 0 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # The others must come to the same decision.
        edl_hvd.barrier()
        time.sleep(0.05)


train(state)
sys.stdout.write(f"ended as {edl_hvd.rank()} of {edl_hvd.size()}\n")
