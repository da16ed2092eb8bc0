"""Variables around a script's functions, which its loop changes through ``nonlocal`` or ``global``, or writes into.

Written into are tensors, as by ``weights.mul_(0.9)``, and numbers in dictionaries, as by ``options["beta"] *= 0.9``.
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
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

from edl_hvd.worker.script_locals import SeenValue, is_only_shown, parts_of, variables_of

_USE = re.compile(r"(LOAD|STORE)_(?:DEREF|CLASSDEREF|GLOBAL)")
_NO_VALUES = (type, FunctionType, ModuleType)
_IN_PLACE = re.compile(r"[a-z]\w*_$")  # a method of tensors that writes into them
_SETS_ANEW = re.compile(r"(copy|zero|fill|set|resize|requires_grad|detach|uniform|normal|random|bernoulli)\w*_$")
_PLAIN = (int, float, numpy.number, torch.Tensor)
_MOST_ITEMS = 100  # of a dictionary that are looked at


@dataclass
class _Variable:
    """One variable, of a module or of a call of the function around.

    Attributes:
        name: As the script has it.
        get: Returns its present value.
        codes: Code that may use it, each with the offset of the instruction that has asked for a loop's first item.
        value: What it was when the loop began.
        items: Numbers and tensors in it then, if it is a dictionary, by key.
    """

    name: str
    get: Callable[[], Any]
    codes: list[tuple[CodeType, int]] = field(default_factory=list)
    value: SeenValue = field(default_factory=lambda: SeenValue.of(None))
    items: dict[str, SeenValue] = field(default_factory=dict)

    def look(self) -> None:
        """Note what it is now."""
        value = self.get()
        self.value = SeenValue.of(value)
        self.items = {key: SeenValue.of(one) for key, one in _items_of(value).items()}

    def is_written_into(self, now: Any) -> bool:
        """Whether code has written into its value, from what that was before, and reads it elsewhere.

        Args:
            now: Its present value.
        """
        if isinstance(now, torch.Tensor):
            return self.value.has_changed(now) and _is_counted_on(
                _tensor_uses(code, self.name) for code, _ in self.codes
            )
        items = _items_of(now)
        keys = [key for key, before in self.items.items() if key in items and before.has_changed(items[key])]
        return any(
            _is_counted_on(
                _item_uses(part, self.name, key, place if part is code else 0)
                for code, place in self.codes
                for part in parts_of(code)
            )
            for key in keys
        )

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
                variable.look()

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
                if is_kept or is_only_shown(now):
                    continue
                is_set = variable.value.has_changed(now) and variable.is_counted_on()
                if is_set or variable.is_written_into(now):
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


def _items_of(value: Any) -> dict[str, Any]:
    """Return the numbers and tensors of a dictionary, but for truth values."""
    if type(value) is not dict or len(value) > _MOST_ITEMS:
        return {}
    return {
        key: one
        for key, one in list(value.items())
        if isinstance(key, str) and isinstance(one, _PLAIN) and not isinstance(one, bool)
    }


def _is_counted_on(uses: Iterable[list[str]]) -> bool:
    """Whether something is changed, is read, and is nowhere set before it is read; of the uses in each code."""
    found = [one for one in uses if one]
    kinds = {kind for one in found for kind in one}
    return not any(one[0] == "set" for one in found) and "read" in kinds and not kinds.isdisjoint({"set", "add to"})


def _tensor_uses(code: CodeType, name: str) -> list[str]:
    """Return how a code, and those inside it, use a tensor: "set" by ``zero_()``, "add to" by ``mul_()``, or "read"."""
    found = []
    for part in parts_of(code):
        for one, after in pairwise(_instructions(part)):
            if one.argval == name and one.opname.startswith("LOAD"):
                is_method = after.opname.startswith("LOAD_") and isinstance(after.argval, str)
                is_written = (
                    is_method and after.opname in ("LOAD_ATTR", "LOAD_METHOD") and _IN_PLACE.match(after.argval)
                )
                found.append("read" if not is_written else "set" if _SETS_ANEW.match(after.argval) else "add to")
    return sorted(found, key=lambda kind: kind != "set")


def _item_uses(code: CodeType, name: str, key: str, place: int) -> list[str]:
    """Return how a code uses an item of a dictionary, in order: "read", "set", or "add to", by ``+=`` and the like."""
    found = []
    for one, index, after in zip(*(_instructions(code)[begin:] for begin in range(3)), strict=False):
        if one.offset >= place and (one.argval, index.argval) == (name, key) and index.opname == "LOAD_CONST":
            if after.opname == "STORE_SUBSCR":
                found.append("set")
            elif after.opname in ("COPY", "DUP_TOP_TWO"):
                found.append("add to")
            else:
                found.append("read")
    return found


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]


def _of_frame(frame: FrameType, name: str) -> Any:
    return variables_of(frame).get(name)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
