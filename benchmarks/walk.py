"""How far a call walks through the package: the modules that it visits, and its stays in them, in a world of one.

    python benchmarks/walk.py                  # a step of state.batches, a commit of the script's own, a join
    python benchmarks/walk.py --show step      # and where the step goes, a line for each stay that begins with a call

A **stay** is an uninterrupted run of calls in one module's file, in the main thread: a call of another module's
function ends it, and so does the return from one. What other packages call in between does not end it. These numbers
say how often a reader has to turn pages, not how long something takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd

PACKAGE = f"{Path(edl_hvd.__file__).parent}/"
STEPS = 20  # the first ones begin what later ones find done


@dataclass(frozen=True)
class Walk:
    """The modules that had a call, or got one back, in order; with the function's name where one was called."""

    visits: tuple[tuple[str, str], ...]

    @property
    def modules(self) -> int:
        return len({module for module, _ in self.visits})

    @property
    def stays(self) -> int:
        return len(list(self._by_stay()))

    @property
    def calls(self) -> int:
        return sum(bool(function) for _, function in self.visits)

    def _by_stay(self) -> Iterator[tuple[str, list[str]]]:
        module, functions = "", list[str]()
        for visited, function in self.visits:
            if visited != module and module:
                yield module, functions
                functions = []
            module, functions = visited, [*functions, *([function] if function else [])]
        if module:
            yield module, functions

    def lines(self) -> list[str]:
        """A line for each stay that begins with a call."""
        return [f"{module}: {' '.join(functions)}" for module, functions in self._by_stay() if functions]


@contextmanager
def walked(found: list[Walk]) -> Iterator[None]:
    """Append the walk of a block to a list."""
    visits: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path, back = frame.f_code.co_filename, frame.f_back
        if not path.startswith(PACKAGE):
            return
        if event == "call":
            visits.append((path.removeprefix(PACKAGE), frame.f_code.co_name))
        elif event == "return" and back is not None and back.f_code.co_filename.startswith(PACKAGE):
            visits.append((back.f_code.co_filename.removeprefix(PACKAGE), ""))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        found.append(Walk(tuple(visits)))


def walks() -> dict[str, Walk]:
    """The walk of each kind. ``edl_hvd.init()`` was called."""
    model = torch.nn.Linear(4, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    dataset = TensorDataset(torch.rand(512, 4), torch.rand(512, 1))
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=8, micro_batch=8)
    loader = DataLoader(dataset, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    steps: list[Walk] = []
    commits: list[Walk] = []
    joins: list[Walk] = []

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        sys.setprofile(None)
        for _ in state.epochs(1):
            items = iter(state.batches(loader))
            item = next(items)
            for _ in range(STEPS):
                with walked(steps):
                    step(*item)
                    item = next(items)
            for item in items:
                step(*item)
        with walked(commits):
            state.commit()

    with walked(joins):
        train(state)
    return {"step": steps[-1], "commit": commits[-1], "join": joins[-1]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=("step", "commit", "join"), help="print where it goes")
    show = parser.parse_args(words).show
    torch.set_num_threads(1)
    edl_hvd.init()
    found = walks()
    for name, walk in found.items():
        print(f"{name:8} {walk.modules:3} modules  {walk.stays:4} stays  {walk.calls:4} calls")
    if show:
        print("", *found[show].lines(), sep="\n")


if __name__ == "__main__":
    main()
