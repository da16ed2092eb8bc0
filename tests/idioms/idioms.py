"""Training idioms, each written twice: in plain PyTorch, and with edl_hvd as the documentation teaches it.

A module of ``catalogue/`` holds some of them. ``docs/recipes.md`` is made from what stands between ``# recipe`` and
``# end`` of each (``recipes.py``), so that it cannot drift from what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.worker.training.optimizer import VELOCITY_FACTOR

SAMPLES = 40
GLOBAL_BATCH = 12  # so the last step of an epoch has 4 samples
FEATURES, CLASSES = 6, 3


@dataclass(frozen=True)
class Job:
    """What an idiom trains on, and how its batches are dealt.

    Attributes:
        micro_batch: Samples of a forward and backward pass; ``None`` for a worker's whole share.
        exact: The result is to be the same for any world, bit for bit.
        epochs: As the script has it.
    """

    micro_batch: int | None = None
    exact: bool = False
    epochs: int = 2
    samples: int = SAMPLES

    @property
    def inputs(self) -> torch.Tensor:
        """Shape (samples, FEATURES), float32."""
        return torch.randn(self.samples, FEATURES, generator=torch.Generator().manual_seed(1))

    @property
    def target(self) -> torch.Tensor:
        """A class for each, int64."""
        return torch.randint(0, CLASSES, (self.samples,), generator=torch.Generator().manual_seed(2))

    def dataset(self, *tensors: torch.Tensor) -> TensorDataset:
        """Of the given tensors, or of ``inputs`` and ``target``."""
        return TensorDataset(*(tensors or (self.inputs, self.target)))

    def batches(self) -> edl_hvd.ElasticBatchSampler:
        """The sampler of the elastic script."""
        return edl_hvd.ElasticBatchSampler(
            self.samples, global_batch=GLOBAL_BATCH, micro_batch=self.micro_batch, seed=3
        )

    def plain_loader(self, dataset: Any = None, epoch: int = 0) -> DataLoader:
        """The loader of the plain script: whole global batches, of the same samples in the same order."""
        order = self.batches().order.samples(3, epoch, 0, self.samples)
        batches = [order[first : first + GLOBAL_BATCH] for first in range(0, self.samples, GLOBAL_BATCH)]
        return DataLoader(dataset or self.dataset(), batch_sampler=batches)


@dataclass(frozen=True)
class Idiom:
    """One of them.

    Attributes:
        title: A heading.
        text: What a user has to know, in one or a few sentences.
        plain: The script in plain PyTorch; returns what it has learned, by name.
        ours: The script with edl_hvd.
        refused: What the message says if edl_hvd refuses it (a regular expression); else empty.
        exact: It is tried with ``exact=True``, too.
        faults: It is tried with workers that are killed and join.
        micro_batches: The layouts that it is tried with.
        tolerance: Relative to the largest element.
        seen: What the script has computed beside the training, by name: after a fault one step's may have been computed
            with the parameters behind that step, see "What a commit copies" in ``docs/architecture.md``.
    """

    title: str
    text: str
    plain: Callable[[Job], Mapping[str, Any]] | None
    ours: Callable[[Job], Mapping[str, Any]]
    refused: str = ""
    exact: bool = True
    faults: bool = True
    micro_batches: tuple[int | None, ...] = (3, 6, None)
    tolerance: float = 1e-5
    seen: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.ours.__name__.removesuffix("_ours")


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All numbers of what a script has learned, by where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach().double()
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flattened(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flattened(item, f"{path}/{number}")
    elif isinstance(value, torch.nn.Module):
        yield from flattened(dict(value.state_dict()), path)
    elif isinstance(value, torch.optim.Optimizer):
        saved = value.state_dict()
        state = {
            number: {key: item for key, item in kept.items() if key != VELOCITY_FACTOR}
            for number, kept in saved["state"].items()
        }
        yield from flattened(state, f"{path}/state")
        rates = [group.get("lr", 0.0) for group in saved["param_groups"]]
        yield from flattened(rates, f"{path}/lr")
    elif value is not None:
        raise TypeError(f"{path} is a {type(value).__name__}, which is not compared")


def differences(found: Any, expected: Any, tolerance: float, but: Sequence[str] = ()) -> list[str]:
    """Where two outcomes differ by more than the tolerance, relative to the largest element; not looking at ``but``."""
    ours, theirs = (
        dict(flattened({name: value for name, value in outcome.items() if name not in but}))
        for outcome in (found, expected)
    )
    said = [f"{path} is in one of them only" for path in sorted(ours.keys() ^ theirs.keys())]
    for path in sorted(ours.keys() & theirs.keys()):
        one, other = ours[path], theirs[path]
        if one.shape != other.shape:
            said.append(f"{path} has shapes {tuple(one.shape)} and {tuple(other.shape)}")
            continue
        if one.numel() == 0 or torch.equal(one, other):
            continue
        apart = float((one - other).abs().max()) / max(float(other.abs().max()), 1e-3)
        if not apart <= tolerance:
            said.append(f"{path} differs by {apart:.2e}")
    return said
