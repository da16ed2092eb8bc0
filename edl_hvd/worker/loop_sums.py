"""What a loop sums up in variables that have their first values where the loop goes on in another world.

The top of an epoch that is continued runs again, so ``running_loss = 0.0`` there, or setting a meter back, makes the
sum of the epoch one of its rest. In an evaluation, what is set before its loop is set again.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy
import torch

from edl_hvd.worker.script_locals import SeenValue, is_of_script, read_later, script_frames, variables_of

_METER = re.compile(r"Meter|Metric|Average|Accuracy|Counter")  # a class that sums up, also of a library
_MOST_PARTS = 64  # of a list, a dictionary or an object, that are looked at
_NUMBERS = (int, float, numpy.number)


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


def _parts_of(value: Any) -> Any:
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
        return _numbers(value) if len(value) <= _MOST_PARTS else None
    if isinstance(value, (list, set)):
        return len(value)
    kind = type(value)
    if (is_of_script(kind) or _METER.search(kind.__name__)) and not isinstance(value, type):
        return _numbers(getattr(value, "__dict__", {}))
    return None


def _numbers(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return those of some values that are numbers or tensors, with their numbers."""
    return {
        key: _parts_of(value)
        for key, value in values.items()
        if isinstance(value, (*_NUMBERS, torch.Tensor, numpy.ndarray)) and not isinstance(value, bool)
    }
