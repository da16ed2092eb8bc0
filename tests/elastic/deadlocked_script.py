"""A training whose workers come to stand still at step 3; ``STANDSTILL`` in the environment says how."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import quick_start  # noqa: F401
from faults import Fault, Points

# isort: split
import horovod.torch
import torch

import edl_hvd
from edl_hvd.worker import process
from edl_hvd.worker.position import position

STEP = 3


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    points = Points(folder, lambda: RuntimeError)
    points.note("start")
    torch.manual_seed(0)
    edl_hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    # Three micro-batches for two workers: one of them computes two.
    batches = edl_hvd.ElasticBatchSampler(100_000, global_batch=6, micro_batch=2)
    loader = torch.utils.data.DataLoader(torch.ones(100_000, 2), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        rank = edl_hvd.rank()
        points.note("enter", rank=rank, size=edl_hvd.size(), step=state.step, generation=state.generation)
        for inputs in state.batches(loader):
            if optimizer.at_boundary:
                points.note("step", step=state.step, rank=rank, size=edl_hvd.size())
            optimizer.zero_grad()
            loss = model(inputs).sum()
            loss.backward()
            if state.step == STEP:
                stand_still(points, os.environ["STANDSTILL"], rank, loss.detach())
            optimizer.step()
            if state.step == STEP + 3 and optimizer.at_boundary:
                return

    train(state)


def stand_still(points: Points, how: str, rank: int, loss: torch.Tensor) -> None:
    # What a script cannot do by edl_hvd.allreduce any more, it may do by a library of its own.
    collectives = process.current().collectives
    if how == "a rank alone":
        if rank == 0 and position.ends_step:
            edl_hvd.allreduce(loss.view(1), op="sum")
    elif how == "another shape":
        collectives.allreduce(torch.zeros(1 + rank), "sum")
    elif how == "another order":
        for op in ("sum", "max") if rank == 0 else ("max", "sum"):
            collectives.allreduce(loss.view(1), op)
    elif how == "in the micro-batches":
        collectives.allreduce(loss.view(1), "sum")
    elif how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1.0)
    elif how == "a slow network":  # from now on rank 1 gets nothing, until the test says so
        if rank == 1:
            poll = horovod.torch.poll
            horovod.torch.poll = lambda handle: (points._folder / "go").exists() and poll(handle)
    else:
        points._strike(0, Fault(how))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
