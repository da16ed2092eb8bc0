"""Values that a script carries from one micro-batch to the next, and that its loss is computed from.

Such as the hidden state of a recurrent network, or a moving mean of rewards. In plain PyTorch they go from one step to
the next. In a body that runs once per micro-batch they go through those of one worker, so what is learned depends on
how many workers there are.
"""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

from edl_hvd.worker.script_locals import SeenValue, read_later, variables_of

_LOOKS = 3  # in a row that have to see a value change
_MOST_LOOKS = 64  # per epoch
_NUMBERS = (int, float, numpy.number, torch.Tensor, numpy.ndarray)
_USE = re.compile(r"(LOAD|STORE)_(?:FAST|DEREF|NAME|GLOBAL)")


class CarriedValues:
    """Looks at the local variables of a loop's function, after each of its first bodies.

    Args:
        warn: Called with the name of a variable.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._names: set[str] | None = None
        self._marks: dict[str, Any] = {}
        self._changes: dict[str, int] = {}
        self._looks = 0

    def look(self, frame: FrameType | None, ends_step: bool) -> None:
        """A body has run.

        Args:
            frame: Of the function with the loop.
            ends_step: Whether it was the last one of its step, which may change what goes into the next step.
        """
        if frame is None or self._names == set() or self._looks == _MOST_LOOKS:
            return
        self._looks += 1
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            if self._names is None:
                self._names = carried_into_loss(frame.f_code, frame.f_lasti)
                if not self._names:
                    return
            variables = variables_of(frame)
            now = {name: _mark(variables[name]) for name in self._names if name in variables}
            if not ends_step:
                for name, mark in now.items():
                    has_changed = mark is not None and self._marks.get(name) not in (None, mark)
                    self._changes[name] = self._changes.get(name, 0) + 1 if has_changed else 0
            self._marks = now
            for name in sorted(name for name, count in self._changes.items() if count >= _LOOKS)[:1]:
                self._names = set()
                self._warn(name)


def _mark(value: Any) -> Any:
    """Return what tells two values apart; ``None`` for what is no number, tensor, or tuple of these."""
    if isinstance(value, (tuple, list)):
        marks = [_mark(one) for one in value]
        return None if None in marks or not marks else marks
    return None if isinstance(value, bool) or not isinstance(value, _NUMBERS) else SeenValue.of(value)


def carried_into_loss(code: CodeType, place: int) -> set[str]:
    """Return the variables whose value of one body goes into the next value, and into what ``backward()`` is called of.

    Args:
        code: Code of the function with the loop.
        place: Offset of the instruction that asks for the loop's next item.
    """
    found = [one for one in dis.get_instructions(code) if one.offset >= place]
    if not found or not found[0].opname.startswith("FOR_ITER"):
        return set()
    body = [one for one in found[1:] if one.offset < found[0].argval]
    return {name for name in read_later(code, place, in_loop=True) if _is_carried(name, body)}


def _is_carried(name: str, body: list[dis.Instruction]) -> bool:
    """Whether the value that a variable has at the beginning goes into its next one and into a loss."""
    from_it, loads, is_backward = {name}, set[str](), False
    in_loss, is_next = False, False
    for one, after in zip(body, [*body[1:], None], strict=True):
        is_backward |= one.argval == "backward" and one.opname.startswith("LOAD")
        # From Python 3.13 on, one instruction may use two variables.
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        uses = list(zip(_USE.findall(one.opname), names, strict=False)) if _USE.match(one.opname) else []
        for kind, variable in uses:
            if kind == "LOAD":
                loads.add(variable)
            elif from_it.isdisjoint(loads):
                from_it.discard(variable)
                is_next &= variable != name
            else:
                from_it.add(variable)
                is_next |= variable == name
        in_loss |= is_backward and not from_it.isdisjoint(loads)
        is_end = one.opname.startswith(("STORE", "POP", "JUMP", "FOR_ITER")) or any(kind == "STORE" for kind, _ in uses)
        if is_end and not (after is not None and one.opname.startswith("STORE") and after.opname.startswith("STORE")):
            loads, is_backward = set(), False
    return in_loss and is_next
