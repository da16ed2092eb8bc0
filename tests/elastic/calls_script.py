"""Calls every public collective in a real world; with a word, calls it in a way that the ranks do not agree on."""

import sys

import quick_start  # noqa: F401

# isort: split
import torch

import edl_hvd

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
         torch.int32, torch.int64, torch.complex64, torch.bool)  # fmt: skip

edl_hvd.init()
state = edl_hvd.State(rounds=0)


def agree() -> None:
    rank, size = edl_hvd.rank(), edl_hvd.size()
    for kind in KINDS:
        parts = [torch.arange(3 * other).reshape(other, 3).to(kind) for other in range(size)]
        result = edl_hvd.allgather(parts[rank])
        assert result.dtype is kind, kind
        assert result.equal(torch.cat(parts)), kind
        result = edl_hvd.broadcast(torch.full((2, 2), rank).to(kind), root_rank=size - 1)
        assert result.equal(torch.full((2, 2), size - 1).to(kind)), kind
        result = edl_hvd.allreduce(torch.full((2, 2), rank).to(kind), op="max" if kind is torch.bool else "sum")
        assert result.equal(torch.full((2, 2), sum(range(size))).to(kind)), kind
    mean = edl_hvd.allreduce(torch.tensor([float(rank)]), op="mean")
    assert mean.item() == (size - 1) / 2
    assert edl_hvd.allreduce(torch.tensor(rank), op="min").item() == 0
    assert edl_hvd.allgather(torch.zeros(0, 4)).shape == (0, 4)
    assert edl_hvd.broadcast(torch.zeros(0)).shape == (0,)
    edl_hvd.barrier()


def differ(how: str) -> None:
    rank = edl_hvd.rank()
    if how == "shapes":
        edl_hvd.allreduce(torch.zeros(2 + rank), op="sum")
    elif how == "one shape":
        edl_hvd.allreduce(torch.zeros(2), op="sum")
        edl_hvd.allreduce(torch.zeros(3 if rank == 1 else 2), op="sum")
    elif how == "roots":
        edl_hvd.broadcast(torch.zeros(2), root_rank=rank)
    elif how == "rows":
        edl_hvd.allgather(torch.zeros(2, 3 + rank))
    elif how == "operations":
        edl_hvd.allreduce(torch.zeros(2), op="max" if rank else "sum")
    elif how == "calls" and rank:
        edl_hvd.barrier()
    elif how == "calls":
        edl_hvd.allreduce(torch.zeros(2), op="sum")
    elif how == "more calls" and rank:
        edl_hvd.barrier()
    elif how == "more calls":
        edl_hvd.allgather(torch.zeros(2))


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    for _ in range(3):
        agree()
    for how in sys.argv[1:]:
        differ(how)
    # One write per line: the launcher may otherwise mix the lines of two workers.
    sys.stdout.write(f"all agreed on rank {edl_hvd.rank()} of {edl_hvd.size()}\n")


train(state)
