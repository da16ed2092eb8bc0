"""Variables around a script's functions, which its loop changes through ``nonlocal`` or ``global``.

They are not of one run of the elastic function, so a worker that goes on keeps them, while one that joins has their
first values; and what a step that is made again has changed in them counts twice.
"""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from edl_hvd.worker.script_locals import SeenValue, is_only_shown, parts_of, variables_of

_USE = re.compile(r"(LOAD|STORE)_(?:DEREF|CLASSDEREF|GLOBAL)")
_NO_VALUES = (type, FunctionType, ModuleType)


@dataclass
class _Variable:
    """One variable, of a module or of a call of the function around.

    Attributes:
        name: As the script has it.
        get: Returns its present value.
        codes: Code that may use it, each with the offset of the instruction that has asked for a loop's first item.
        value: What it was when the loop began.
    """

    name: str
    get: Callable[[], Any]
    codes: list[tuple[CodeType, int]] = field(default_factory=list)
    value: SeenValue = field(default_factory=lambda: SeenValue.of(None))

    def is_counted_on(self) -> bool:
        """Whether code sets it that has read it before, and no code sets it before it reads it."""
        firsts = [first for code, place in self.codes for first in _first_uses(code, self.name, place)]
        return any(is_set for _, is_set in firsts) and all(kind == "LOAD" for kind, is_set in firsts if is_set)


class SharedVariables:
    """Those that a script's functions may set, as they were when a loop began.

    Args:
        frames: Frames of the functions that are under way.
        functions: Functions that these may call.
    """

    def __init__(self, frames: Sequence[FrameType], functions: Iterable[FunctionType]) -> None:
        self._variables: dict[Any, _Variable] = {}
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            for frame in frames:
                self._add_frame(frame)
            for function in functions:
                self._add_function(function)
            for variable in self._variables.values():
                variable.value = SeenValue.of(variable.get())

    def _add_frame(self, frame: FrameType) -> None:
        code = frame.f_code
        self._add_globals(code, frame.f_globals, frame.f_lasti)
        for name in code.co_freevars:
            self._add(("around", name), name, partial(_of_frame, frame, name), code, frame.f_lasti)

    def _add_function(self, function: FunctionType) -> None:
        code = function.__code__
        self._add_globals(code, function.__globals__, 0)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            of_frame = self._variables.get(("around", name))
            is_same = of_frame is not None and of_frame.get() is _contents(cell)
            key: Any = ("around", name) if is_same else id(cell)
            self._add(key, name, partial(_contents, cell), code, 0)

    def _add_globals(self, code: CodeType, variables: dict[str, Any], place: int) -> None:
        names = {name for part in parts_of(code) for name in part.co_names if name in variables}
        for name in names:
            if not isinstance(variables[name], _NO_VALUES):
                self._add((id(variables), name), name, partial(variables.get, name), code, place)

    def _add(self, key: Any, name: str, get: Callable[[], Any], code: CodeType, place: int) -> None:
        self._variables.setdefault(key, _Variable(name, get)).codes.append((code, place))

    def lost(self, kept: Set[int]) -> list[str]:
        """Return the names of variables that have changed and that the script counts on.

        Args:
            kept: Identities of what State keeps.
        """
        found: list[str] = []
        with contextlib.suppress(Exception):
            for variable in self._variables.values():
                now = variable.get()
                is_kept = id(now) in kept and not isinstance(now, (int, float))  # small numbers are shared
                is_left_out = is_kept or is_only_shown(now)
                if variable.value.has_changed(now) and not is_left_out and variable.is_counted_on():
                    found.append(variable.name)
        return sorted(set(found))


def _first_uses(code: CodeType, name: str, place: int) -> Iterator[tuple[str, bool]]:
    """Yield how a code, and each one inside it, uses a variable first, and whether it sets it at all.

    Args:
        code: Code of a function.
        name: Name of the variable.
        place: Offset from which on it is looked at; what stands before a loop sets the first value.
    """
    for part in parts_of(code):
        begin = place if part is code else 0
        uses = [
            found[1]
            for one in dis.get_instructions(part)
            if one.argval == name and one.offset >= begin and (found := _USE.fullmatch(one.opname))
        ]
        if uses:
            yield uses[0], "STORE" in uses


def _of_frame(frame: FrameType, name: str) -> Any:
    return variables_of(frame).get(name)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
