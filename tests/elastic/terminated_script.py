"""Trains alone until it is terminated: each step waits for a line on standard input and answers with its number."""

from __future__ import annotations

import logging
import select
import sys

import quick_start  # noqa: F401

# isort: split
import torch

import edl_hvd


def main(folder: str) -> None:
    logging.basicConfig(format="%(message)s")
    edl_hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(100_000, global_batch=1)
    loader = torch.utils.data.DataLoader(torch.ones(100_000, 2), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic(checkpoint=f"{folder}/checkpoints", events=f"{folder}/events.jsonl")
    def train(state: edl_hvd.State) -> None:
        for inputs in state.batches(loader):
            print(state.step, flush=True)
            # Python would not hear of a signal that comes just before it waits in a read.
            while not select.select([sys.stdin], [], [], 0.1)[0]:
                pass
            if not sys.stdin.readline():
                return
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

    train(state)


if __name__ == "__main__":
    main(sys.argv[1])
