"""What a loop sums up in variables that have their first values where the loop goes on in another world.

The top of an epoch that is continued runs again, so ``running_loss = 0.0`` there, or setting a meter back, makes the
sum of the epoch one of its rest. In an evaluation, what is set before its loop is set again.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy
import torch

from edl_hvd.worker.script_locals import SeenValue, is_of_script, read_later, script_frames, variables_of

_METER = re.compile(r"Meter|Metric|Average|Accuracy|Counter")  # a class that sums up, also of a library
_MOST_PARTS = 64  # of a list, a dictionary or an object, that are looked at
_DEEPEST = 2  # dictionaries, lists and objects inside each other
_NUMBERS = (int, float, numpy.number)
_ITEMS = (*_NUMBERS, torch.Tensor, numpy.ndarray)
_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


@dataclass(frozen=True)
class BegunVariable:
    """A variable as a loop began.

    Attributes:
        identity: Of its value.
        parts: The numbers that it held; ``None`` where they are not known.
    """

    identity: int
    parts: Any

    def is_set_anew(self, now: BegunVariable) -> bool:
        """Whether it was set to the same as then, or to an object of which the numbers are not known."""
        return self.parts == now.parts and not (now.parts is None and self.identity == now.identity)


class LoopSums:
    """The variables of the function with a loop over batches, as they were when that loop began, or went on."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._place = 0
        self._seen: dict[str, SeenValue] = {}
        self._begun: dict[str, BegunVariable] = {}
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            frame = next(script_frames(sys._getframe(1)), None)
            if frame is not None:
                variables = variables_of(frame)
                self._seen = {name: SeenValue.of(value) for name, value in variables.items()}
                self._begun = {name: BegunVariable(id(value), _parts_of(value)) for name, value in variables.items()}
                self._frame, self._place = frame, frame.f_lasti

    def end(self) -> dict[str, BegunVariable]:
        """The loop has ended; return those variables that it has changed and reads, as they were when it began."""
        frame, self._frame = self._frame, None  # which holds all variables of a function that has returned
        found = {}
        with contextlib.suppress(Exception):
            now = variables_of(frame) if frame is not None else {}
            names = read_later(frame.f_code, self._place, in_loop=True) if frame is not None else set()
            for name in names & now.keys() & self._seen.keys():
                if isinstance(now[name], bool):
                    continue  # it is no sum
                if self._seen[name].has_changed(now[name]) or self._has_other_parts(name, now[name]):
                    found[name] = self._begun[name]
        return found

    def _has_other_parts(self, name: str, now: Any) -> bool:
        return not isinstance(now, _NUMBERS) and self._begun[name].parts != _parts_of(now)

    def begun_anew(self, before: Mapping[str, BegunVariable]) -> list[str]:
        """Return the names of variables that have been set anew since the loop began in a world before.

        Args:
            before: Result of :meth:`end` there.
        """
        found: list[str] = []
        with contextlib.suppress(Exception):  # keys of a dictionary may be compared by the script's own code
            both = sorted(before.keys() & self._begun.keys())
            found += [name for name in both if before[name].is_set_anew(self._begun[name])]
        return found


def _parts_of(value: Any, depth: int = 0) -> Any:
    """Return the numbers that a variable holds, by which two objects are compared; ``None`` where there are none."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Tensor):
        # Those of a GPU are not waited for.
        is_known = value.device.type == "cpu" and value.layout is torch.strided and value.numel() <= _MOST_PARTS
        return value.tolist() if is_known else None
    if isinstance(value, numpy.ndarray):
        return value.tolist() if value.size <= _MOST_PARTS else None
    if isinstance(value, dict):
        return _numbers(value, depth) if len(value) <= _MOST_PARTS else None
    if isinstance(value, (list, deque)):
        inside = _numbers(dict(enumerate(value)), depth, but=_ITEMS) if len(value) <= _MOST_PARTS else {}
        return [len(value), inside] if inside else len(value)
    if isinstance(value, set):
        return len(value)
    if not _is_meter(value):
        return None
    # What is inside these moves with the training, and State keeps it.
    return _numbers(getattr(value, "__dict__", {}), _DEEPEST if isinstance(value, _TRAINED) else depth)


def _is_meter(value: Any) -> bool:
    """Whether an object may sum something up: one of the script, or of a class with such a name."""
    kind = type(value)
    return (is_of_script(kind) or bool(_METER.search(kind.__name__))) and not isinstance(value, type)


def _numbers(values: Mapping[Any, Any], depth: int, but: tuple[type, ...] = ()) -> dict[Any, Any]:
    """Return those of some values that are numbers or tensors, with their numbers, and meters and dictionaries of them.

    Args:
        values: Items of a dictionary or a list, or attributes of an object.
        depth: Number of objects that these are inside of.
        but: Classes that are left out, such as numbers and tensors of a list, which grows.
    """
    found = {}
    for key, value in values.items():
        if isinstance(value, _ITEMS):
            if not isinstance(value, (bool, *but)):
                found[key] = _parts_of(value)
        elif depth < _DEEPEST and (isinstance(value, (dict, list)) or _is_meter(value)):
            found[key] = _parts_of(value, depth + 1)
    return found
