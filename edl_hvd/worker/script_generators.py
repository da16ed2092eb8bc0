"""Random generators that a script has made itself and has not given to State, and that its loop draws from.

Each worker has its own, in whatever state its own micro-batches leave it; one that joins has the first state.
"""

from __future__ import annotations

import contextlib
import dis
import random
from collections.abc import Iterable, Iterator, Set
from types import CodeType
from typing import Any

import numpy
import torch

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_SEEDS = {"manual_seed", "seed", "set_state", "setstate"}


class ScriptGenerators:
    """Those that the functions of a script reach by names, as they were when a loop began.

    Args:
        found: Generators, each with its name.
        codes: Code that the elastic function may run, each with the offset of the instruction that has asked for the
            first item of its loop.
    """

    def __init__(self, found: Iterable[tuple[str, Any]], codes: Iterable[tuple[CodeType, int]]) -> None:
        self._codes = list(codes)
        self._generators = [(name, generator, _state_of(generator)) for name, generator in found]

    def moved(self, kept: Set[int]) -> list[str]:
        """Return the names of those that have been drawn from and that no code of the script seeds in the loop.

        Args:
            kept: Identities of what State keeps, and of generators that only loaders draw from.
        """
        found: list[str] = []
        with contextlib.suppress(Exception):
            for name, generator, before in self._generators:
                if id(generator) not in kept and _state_of(generator) != before and not self._is_seeded(name):
                    found.append(name)
        return sorted(set(found))

    def _is_seeded(self, path: str) -> bool:
        name = path.rpartition(".")[2]
        return any(_seeds(code, name, place) for code, place in self._codes)


def of_loader(value: Any) -> Iterator[int]:
    """Yield the identities of the generators that a ``DataLoader`` of torch draws from for itself."""
    if isinstance(value, torch.utils.data.DataLoader):
        parts = (value, value.sampler, value.batch_sampler, getattr(value.batch_sampler, "sampler", None))
        for part in parts:
            yield id(getattr(part, "generator", None))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, numpy.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return repr(generator.get_state())
    return generator.getstate()


def _seeds(code: CodeType, name: str, place: int) -> bool:
    """Whether a code, or one inside it, seeds a generator of that name, from some offset of it on."""
    before: Any = None
    for one in dis.get_instructions(code):
        is_loaded = one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_loaded and one.offset >= place and one.argval in _SEEDS and before == name:
            return True
        if one.opname not in ("CACHE", "EXTENDED_ARG"):
            # From Python 3.13 on, one instruction may load two variables.
            is_pair = isinstance(one.argval, tuple) and one.opname.startswith("LOAD_FAST")
            before = one.argval[-1] if is_pair else one.argval
    return any(_seeds(part, name, 0) for part in code.co_consts if isinstance(part, CodeType))
