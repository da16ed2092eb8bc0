"""Copies of the weights that an elastic function takes again when it runs again, in mid-training.

A list of references before the loop over epochs, or ``old = copy.deepcopy(model)`` at the top of an epoch, are of other
weights then than in a job that nothing interrupted. They cannot be restored, so they are named.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

import torch

from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.script_locals import is_of_script, script_frames, variables_of

_DEEPEST, _MOST_TENSORS = 2, 20_000


def weight_copies(store: StateStore) -> set[str]:
    """Return the names of the calling script's local variables that are copies of the present weights.

    Named are those in which each tensor that has the shape of a weight equals a tensor in State, and one at least
    equals a weight that an optimizer steps. A tensor that has one value throughout, such as of zeros, is no copy.
    """
    with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
        weights = _Weights(store)
        frames = script_frames(sys._getframe(1))
        return {path for frame in frames for path, parts in _groups_of(frame) if weights.are_copied(parts)}
    return set()


class _Weights:
    """Tensors in State, to be compared with those of a script."""

    def __init__(self, store: StateStore) -> None:
        self._live: dict[torch.Size, list[torch.Tensor]] = {}
        for tensor in store.live(store.commit).tensors.values():
            self._live.setdefault(tensor.shape, []).append(tensor.detach())
        self._places = {_place(tensor) for tensors in self._live.values() for tensor in tensors}
        groups = [group for optimizer in store.of_kind(torch.optim.Optimizer) for group in optimizer.param_groups]
        weights = [tensor for group in groups if group["lr"] for tensor in group["params"]]
        self._stepped = [tensor.detach() for tensor in weights if tensor.requires_grad]
        self._stepped_places = {_place(tensor) for tensor in self._stepped}
        self._shapes = {tensor.shape for tensor in self._stepped}
        self._length = sum(tensor.numel() for tensor in self._stepped)

    def are_copied(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether tensors are copies of weights."""
        is_found = False
        for tensor in tensors:
            if _place(tensor) in self._places or not tensor.numel():
                continue
            if tensor.shape in self._shapes:
                same = [live for live in self._live[tensor.shape] if _is_equal(live, tensor)]
                if not same:
                    return False
                is_found |= any(_place(live) in self._stepped_places for live in same) and not _is_constant(tensor)
            elif tensor.shape == (self._length,):
                is_found |= _is_equal(torch.cat([one.reshape(-1) for one in self._stepped]), tensor)
        return is_found


def _groups_of(frame: FrameType) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the tensors of each variable of a call, without those of functions around it, which are not run again."""
    for name, value in variables_of(frame).items():
        if name not in frame.f_code.co_freevars:
            yield from _parts_of(name, value)


def _parts_of(path: str, value: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the tensors of a value, and those of the attributes of an object of the script."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, Mapping, list, tuple)):
        yield path, list(islice(_tensors_of(value), _MOST_TENSORS))
    elif is_of_script(type(value)) and path.count(".") < _DEEPEST:
        for name, part in getattr(value, "__dict__", {}).items():
            yield from _parts_of(f"{path}.{name}", part)


def _tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, torch.nn.Module):
        yield from (tensor.detach() for tensor in value.state_dict().values() if isinstance(tensor, torch.Tensor))
    elif isinstance(value, (Mapping, list, tuple)) and depth <= _DEEPEST:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_of(part, depth + 1)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


def _is_constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())
