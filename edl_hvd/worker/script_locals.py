"""Local variables of a script that its loop over epochs changes, and that have their first values in the next run.

A worker that survives runs the elastic function again, and a worker that joins runs it for the first time. What a
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
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy
import torch

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_ENTRY = str(Path(__file__).resolve().with_name("elastic.py"))  # the elastic function is called from there
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
_PACKAGES = {"site-packages", "dist-packages"}  # of the user, or of the system
_PLAIN = (bool, int, float, str, type(None), numpy.number)
# A float within this distance of the time of day is a time, such as when the training began. A script sets it again in
# each run, and it need not be kept.
_TIME_OF_DAY_S = 1e8
# So is one of a clock that began when the machine did, if its former value was one, too: such a clock is near the sums
# and counts of a script where the machine is new. Values from shortly before the import of this package count.
_UPTIME_CLOCKS = tuple((clock, max(clock() - 60.0, clock() / 2)) for clock in (time.monotonic, time.perf_counter))
_ONLY_SHOWN = re.compile(
    r"Log(ger|s)?$|Writer|Meter|Timer|Stopwatch|Progress|Profil|Track|Record|Monitor|History|tqdm|Bar$"
)
_SMALL_ARRAY = 1024  # elements of an array of NumPy's whose values are compared; others by identity alone


class _Identity:
    """Which object a value was. It is not held, and another object may get its address once it has been freed."""

    __slots__ = ("_address", "_reference")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(value)
        except TypeError:  # a list or a dictionary: the address is all there is
            self._reference = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._address == other._address and self._lives() and other._lives()

    def _lives(self) -> bool:
        return self._reference is None or self._reference() is not None

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class SeenValue:
    """The value of one variable when the loop began. Objects are not held: the script may want them freed.

    Attributes:
        mark: Of a number or a string its type and value; of another object its identity, and its version, length
            or bytes.
    """

    mark: Any

    @classmethod
    def of(cls, value: Any) -> SeenValue:
        """Return the mark of a value."""
        if isinstance(value, _PLAIN):
            return cls((type(value), value))
        if isinstance(value, torch.Tensor):
            return cls((_Identity(value), None if value.is_inference() else value._version))
        if isinstance(value, numpy.ndarray):
            is_compared = value.size <= _SMALL_ARRAY and not value.dtype.hasobject
            return cls((_Identity(value), value.tobytes() if is_compared else None))
        return cls((_Identity(value), len(value) if isinstance(value, (list, dict, set, deque)) else None))

    def has_changed(self, now: Any) -> bool:
        """Whether the variable has another value now, which is not a time of day."""
        return SeenValue.of(now) != self and not (isinstance(now, float) and self._is_time(now))

    def _is_time(self, now: float) -> bool:
        """Whether a new value is a time."""
        if abs(now - time.time()) < _TIME_OF_DAY_S:
            return True
        before = self.mark[1]
        was_number = isinstance(before, (int, float)) and self.mark[0] is type(before)
        return any(first <= now <= clock() and not (was_number and before < first) for clock, first in _UPTIME_CLOCKS)


class ScriptLocals:
    """The local variables of a script's running functions, as they were when a loop began.

    Args:
        frames: Frames of the functions, the innermost first.
    """

    def __init__(self, frames: list[FrameType]) -> None:
        self._frames = [(frame, frame.f_lasti, _own_variables(frame)) for frame in frames]

    @classmethod
    def now(cls) -> ScriptLocals:
        """Return those of the script that has called this package."""
        return cls(list(script_frames(sys._getframe(1))))

    def lost(self) -> list[str]:
        """Return the names of variables that have changed and that the script reads before it sets them again."""
        found = []
        for frame, place, before in self._frames:
            now = variables_of(frame)
            changed = [name for name, value in before.items() if name in now and value.has_changed(now[name])]
            if changed:
                read = read_later(frame.f_code, place)
                found += [name for name in changed if name in read]
        return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a call that is under way, or has just been left.

    Before Python 3.13, ``f_locals`` of a function is a dictionary that the frame holds until the call ends, with all
    large tensors in it. So it is cleared here. At the top of a module ``f_locals`` is the module's own dictionary.
    """
    found = frame.f_locals
    variables = dict(found)
    if isinstance(found, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return variables


def _own_variables(frame: FrameType) -> dict[str, SeenValue]:
    """Return the variables of this call, without those of functions around it, which are not run again."""
    around = frame.f_code.co_freevars
    return {name: SeenValue.of(value) for name, value in variables_of(frame).items() if name not in around}


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the elastic function and of what it calls, without those of libraries."""
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        if not _is_of_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_only_shown(value: Any) -> bool:
    """Whether an object counts or records something for people, by the name of its class, and decides nothing."""
    return _ONLY_SHOWN.search(type(value).__name__) is not None


def is_of_script(value: type | FunctionType) -> bool:
    """Whether a class or a function is of the script, or of modules of its own, and not of a library."""
    if isinstance(value, FunctionType):
        return not _is_of_library(value.__code__.co_filename)
    module = sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    return not _is_of_library(path) if path else module is None or value.__module__ == "__main__"


def _is_of_library(path: str) -> bool:
    return path.startswith((_PACKAGE, *_LIBRARIES)) or not _PACKAGES.isdisjoint(Path(path).parts)


def parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions and expressions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts_of(constant)


def read_later(code: CodeType, place: int, in_loop: bool = False) -> set[str]:
    """Return the variables of a function that it reads in its loop before it sets them, or reads after the loop.

    Args:
        code: Code of the function.
        place: Offset of the instruction that has asked for the first item of the loop.
        in_loop: Whether to leave out what it reads after the loop.
    """
    loop_end = None
    is_read_first: dict[str, bool] = {}
    read_after: set[str] = set()
    for one in dis.get_instructions(code):
        if one.offset == place and one.opname.startswith("FOR_ITER"):
            loop_end = one.argval
        if one.offset < place or (in_loop and loop_end is not None and one.offset >= loop_end):
            continue
        # From Python 3.13 on, one instruction may load or store two variables.
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        for kind, name in zip(re.findall(r"(LOAD|STORE)_(?:FAST|DEREF)", one.opname), names, strict=False):
            is_read_first.setdefault(name, kind == "LOAD")
            if kind == "LOAD" and loop_end is not None and one.offset >= loop_end:
                read_after.add(name)
    return {name for name, is_read in is_read_first.items() if is_read} | read_after
