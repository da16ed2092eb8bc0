"""What one commit does, on stock Horovod or with ``edl_hvd``: how many collectives, and is new memory filled?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import quick_start  # noqa: F401

# isort: split
import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops


def main(engine: str) -> None:
    {"stock": stock, "edl_hvd": ours}[engine]()


def stock() -> None:
    hvd.init()
    model, optimizer = build()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    report(state.commit, lambda: list(state._handlers["model"]._saved_model_state.values()), hvd.rank())


def ours() -> None:
    import edl_hvd

    edl_hvd.init()
    model, optimizer = build()
    optimizer = edl_hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = edl_hvd.State(model=model, optimizer=optimizer)

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        report(state.commit, lambda: list(state._runtime.store.export()[1].values()), edl_hvd.rank())

    train(state)


def build() -> tuple[Any, Any]:
    model = torch.nn.Linear(100, 100)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def report(commit: Callable[[], None], saved: Callable[[], list[torch.Tensor]], rank: int) -> None:
    commit()
    before = saved()  # held, so that its memory is not given out again
    calls = count_collectives()
    commit()
    reused = {tensor.data_ptr() for tensor in saved()} == {tensor.data_ptr() for tensor in before}
    if rank == 0:
        print("RESULT " + json.dumps({"collectives": len(calls), "reused": reused}), flush=True)


def count_collectives() -> list[str]:
    """A list that grows by each collective handed to Horovod from now on."""
    calls: list[str] = []
    library = mpi_ops.mpi_lib

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return call

    for name in dir(library):
        if "_async_" in name:
            setattr(library, name, counted(name, getattr(library, name)))
    return calls


if __name__ == "__main__":
    main(sys.argv[1])
