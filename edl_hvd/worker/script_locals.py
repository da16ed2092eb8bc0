"""Local variables of a script that its loop over epochs changes, and that begin anew when the function runs again.

A worker that survives runs the elastic function once more, and a worker that joins runs it for the first time. What a
script keeps in a local variable, such as the best accuracy so far or a copy of the best weights, is lost on both.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_ENTRY = str(Path(__file__).resolve().with_name("elastic.py"))
# Its frame calls the elastic function.
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
_PLAIN = (bool, int, float, str, type(None))
_LONGEST_CLOCK_S = 1e8
# A number so near to the time of day is a moment, which may be another one in the next run.


@dataclass(frozen=True)
class _Kept:
    """One variable at the beginning of the loop. Large objects are not held: the script may want them freed.

    Attributes:
        mark: A number or a word itself; of other objects, which one it is, and what shows that it was changed in place.
    """

    mark: Any

    @classmethod
    def of(cls, value: Any) -> _Kept:
        if isinstance(value, _PLAIN):
            return cls((type(value), value))
        if isinstance(value, torch.Tensor):
            return cls((id(value), None if value.is_inference() else value._version))
        return cls((id(value), len(value) if isinstance(value, (list, dict, set)) else None))

    def has_changed(self, now: Any) -> bool:
        is_moment = isinstance(now, float) and abs(now - time.time()) < _LONGEST_CLOCK_S
        return not is_moment and _Kept.of(now) != self


class ScriptLocals:
    """The local variables of the functions of a script that are running, as they were when a loop began."""

    def __init__(self, frames: list[FrameType]) -> None:
        self._frames = [(frame, frame.f_lasti, _own_variables(frame)) for frame in frames]

    @classmethod
    def now(cls) -> ScriptLocals:
        """Return those of the script that has called this package."""
        return cls(list(_script_frames(sys._getframe(1))))

    def lost(self) -> list[str]:
        """Return the names of variables that have changed and that the script reads before it sets them again."""
        found = []
        for frame, place, kept in self._frames:
            now = variables_of(frame)
            changed = [name for name, one in kept.items() if name in now and one.has_changed(now[name])]
            if changed:
                read = _read_later(frame.f_code, place)
                found += [name for name in changed if name in read]
        return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a call that is under way, or has just been left.

    Before Python 3.13 the frame keeps what it has returned for as long as the call lasts, and so whatever large tensors
    are among the variables; here it does not. At the top of a module they are the variables themselves.
    """
    found = frame.f_locals
    variables = dict(found)
    if isinstance(found, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return variables


def _own_variables(frame: FrameType) -> dict[str, _Kept]:
    """Those of this call; what a function around it has set lives on."""
    around = frame.f_code.co_freevars
    return {name: _Kept.of(value) for name, value in variables_of(frame).items() if name not in around}


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield those of the elastic function, and of what it calls, without libraries."""
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        if not frame.f_code.co_filename.startswith((_PACKAGE, *_LIBRARIES)):
            yield frame
        frame = frame.f_back


def _read_later(code: CodeType, place: int) -> set[str]:
    """Return the variables that are read before they are set, from a place of a function on, or behind its loop.

    Args:
        code: Code of the function.
        place: Offset of the instruction that has asked for the first item of the loop.
    """
    end = None
    first: dict[str, bool] = {}
    behind: set[str] = set()
    for one in dis.get_instructions(code):
        if one.offset == place and one.opname.startswith("FOR_ITER"):
            end = one.argval
        if one.offset < place:
            continue
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        for kind, name in zip(re.findall(r"(LOAD|STORE)_(?:FAST|DEREF)", one.opname), names, strict=False):
            first.setdefault(name, kind == "LOAD")
            if kind == "LOAD" and end is not None and one.offset >= end:
                behind.add(name)
    return {name for name, is_read in first.items() if is_read} | behind
