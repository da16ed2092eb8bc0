"""Counters of a script's loop over an epoch that begin anew where the epoch goes on in another world.

``for i, step in enumerate(state.steps(loader)):`` counts from 0 again there, and so does whatever else the loop gets
beside the steps, such as the numbers of a ``range`` or a schedule that is zipped with them.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
from collections.abc import Callable
from types import CodeType

from edl_hvd.worker.script_locals import script_frames, variables_of

_TARGETS = re.compile(r"EXTENDED_ARG|CACHE|NOP|UNPACK_SEQUENCE|STORE_")  # what follows a loop's first instruction


class LoopCounters:
    """Looks at the whole numbers that a loop sets beside its steps, in the first bodies of an epoch that goes on.

    Args:
        warn: Called with the name of a counter, and what it began with.
        needs_two: Whether items of the loop may hold numbers themselves, so that only one that rises is a counter.
    """

    def __init__(self, warn: Callable[[str, int], None], needs_two: bool = False) -> None:
        self._warn = warn
        self._needs_two = needs_two
        self._begun: dict[str, int] | None = None
        self._is_over = False

    def look(self, right: set[int]) -> None:
        """A body has run.

        Args:
            right: What a counter may be in it that has not begun anew.
        """
        if self._is_over:
            return
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            now = _counters()
            if self._begun is None:
                self._begun = {name: value for name, value in now.items() if value not in right}
                self._is_over = not self._begun
                if self._needs_two:
                    return
            else:
                self._begun = {name: value for name, value in self._begun.items() if now.get(name) == value + 1}
            for name, value in list(self._begun.items())[:1]:
                self._warn(name, value)
            self._is_over = True


def _counters() -> dict[str, int]:
    """Return the whole numbers that the innermost loop of the script sets by itself, and that the script reads."""
    frame = next(script_frames(sys._getframe(2)), None)
    if frame is None:
        return {}
    names = _read_targets(frame.f_code, frame.f_lasti)
    return {name: value for name, value in variables_of(frame).items() if name in names and type(value) is int}


def _read_targets(code: CodeType, place: int) -> set[str]:
    """Return the variables that a loop sets for each item, where it sets several, and that the function reads.

    Args:
        code: Code of the function.
        place: Offset of the instruction that asks for the next item.
    """
    found = [one for one in dis.get_instructions(code) if one.offset >= place]
    if not found or not found[0].opname.startswith("FOR_ITER"):
        return set()
    targets: set[str] = set()
    for one in found[1:]:
        if not _TARGETS.match(one.opname):
            break
        if one.opname.startswith("STORE_"):
            # From Python 3.13 on, one instruction may store two variables, or store one and load another.
            targets.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
            if "LOAD" in one.opname:
                break
    is_one = len(targets) < 2
    return set() if is_one else targets & _read(code)


def _read(code: CodeType) -> set[str]:
    read: set[str] = set()
    for one in dis.get_instructions(code):
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        kinds = re.findall(r"(LOAD|STORE)_", one.opname)
        read.update(name for kind, name in zip(kinds, names, strict=False) if kind == "LOAD" and isinstance(name, str))
    return read
