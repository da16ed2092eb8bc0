"""Numbers that a script keeps on objects of its own, or in modules, outside State, and that its loop counts on.

A worker that joins has the first values of them, and a step that is made again counts twice. Of the script's objects
those are named whose new value the script computes from the former one, and reads elsewhere, too. A module is there to
be computed with, so whatever changes in it is named, such as the center of a loss or the smoothing of a criterion.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import re
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice, pairwise
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy
import torch

from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.script_generators import GENERATORS, ScriptGenerators, of_loader
from edl_hvd.worker.script_locals import SeenValue, is_of_script, is_only_shown, parts_of, script_frames, variables_of
from edl_hvd.worker.shared_variables import SharedVariables

_MOST_OBJECTS, _MOST_NUMBERS, _DEEPEST = 300, 300, 2
_MOST_PARTS = 32  # of a list of callbacks
# What a new object has, or one that is loaded, says nothing of what the loop does.
_MAKERS = ("__init__", "__post_init__", "__setstate__", "load_state_dict")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_CLOCKS = {"time", "monotonic", "perf_counter"}
_ONLY_MEASURED = re.compile(r"Metric|Accuracy|Score|Precision|Recall|Confusion")  # modules, as those of torchmetrics
_INDEX = {"LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL", "BUILD_TUPLE", "BUILD_SLICE", "LOAD_SMALL_INT"}
_NO_USES = {"CACHE", "EXTENDED_ARG", "RESUME", "PRECALL", "PUSH_NULL"}
_ORDERS = {"<", ">", "<=", ">="}
_PARTS_OF_VALUE = {"LOAD_ATTR", "LOAD_METHOD", "BINARY_SUBSCR", "BINARY_OP_SUBSCR", "CALL"}
_NOT_OF_SCRIPTS = ("torch.", "edl_hvd.", "builtins")
_KEPT_BY_OTHERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


@dataclass(frozen=True)
class _Code:
    """Code that the elastic function may run.

    Attributes:
        code: The code itself.
        owner: Class whose method it is; ``None`` for a function.
        place: Offset of the instruction that has asked for the first item of its loop; 0 where it has none.
    """

    code: CodeType
    owner: type | None = None
    place: int = 0


@dataclass(frozen=True)
class _Number:
    """A number of an object when the loop began. The object is not held: the script may want it freed."""

    owner: weakref.ref[Any]
    path: str
    value: SeenValue

    @property
    def name(self) -> str:
        """Name of the attribute."""
        return self.path.rpartition(".")[2]


@dataclass
class _Reached:
    """What the frames of a script reach by names: local variables, ``self``, closures and globals."""

    kept: Set[int]
    codes: list[_Code]
    objects: list[tuple[str, Any]] = field(default_factory=list)
    modules: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    of_loaders: set[int] = field(default_factory=set)
    _pending: deque[tuple[str, Any]] = field(default_factory=deque)
    _seen: set[int] = field(default_factory=set)

    def follow(self, frames: Iterable[FrameType]) -> None:
        """Collect the objects and the code that frames reach, those of the first frame first."""
        for frame in frames:
            self.codes.append(_Code(frame.f_code, place=frame.f_lasti))
            self._seen.add(id(frame.f_code))
            variables = variables_of(frame)
            self._pending += [item for item in variables.items() if item[0] != "self"]
            self._pending += _globals_of(frame.f_code, frame.f_globals)
        # An object that has another name goes by it.
        self._pending += [("self", variables_of(frame).get("self")) for frame in frames]
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            name, value = self._pending.popleft()
            if id(value) not in self._seen and id(value) not in self.kept:
                self._visit(name, value)

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            self.modules.append((name, value))
        self.of_loaders.update(of_loader(value))
        if isinstance(value, GENERATORS):
            self._seen.add(id(value))
            self.generators.append((name, value))
        elif kind is MethodType:
            self._pending.append(("self", value.__self__))
        elif kind is FunctionType:
            self._visit_function(value)
        elif (is_of_script(kind) or kind is Namespace) and not issubclass(kind, (type, *_KEPT_BY_OTHERS)):
            self._seen.add(id(value))
            self.objects.append((name, value))
            for owner, method in _methods_of(kind):
                self._visit_function(method, owner)
            if name.count(".") < _DEEPEST:
                self._pending += [(f"{name}.{key}", part) for key, part in _attributes_of(value).items()]
                self._pending += _objects_in_lists(name, value)

    def _visit_function(self, function: FunctionType, owner: type | None = None) -> None:
        code = function.__code__
        if id(code) in self._seen or not is_of_script(function):
            return
        self._seen.add(id(code))
        self.codes.append(_Code(code, owner))
        self.functions.append(function)
        self._pending += _globals_of(code, function.__globals__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._pending.append((name, cell.cell_contents))
            except ValueError:  # it is empty
                continue


class OptimizerNumbers:
    """Numbers that optimizers keep beside their state_dict(), as they were when a loop began.

    Args:
        optimizers: Optimizers of the state.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._seen: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            self._seen += [(optimizer, _counts_of(optimizer)) for optimizer in optimizers]

    def moved(self) -> list[str]:
        """Return the names of those that have changed and that their optimizer computes with."""
        found: list[str] = []
        with contextlib.suppress(Exception):
            for optimizer, before in self._seen:
                kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith(_NOT_OF_SCRIPTS)]
                members = [inspect.unwrap(one) for kind in kinds for one in vars(kind).values() if callable(one)]
                codes = [_Code(one.__code__) for one in members if type(one) is FunctionType]
                now = _counts_of(optimizer)
                found += [
                    f"{kinds[0].__name__}.{name}"
                    for name, value in before.items()
                    if now.get(name, value) != value and _is_counted_on(name, codes, is_moment=False)
                ]
        return sorted(set(found))


class ScriptObjects:
    """The numbers on objects of a script that are not in State, as they were when a loop began.

    Args:
        frames: Frames of the functions, the innermost first.
        store: State of the job.
    """

    def __init__(self, frames: Sequence[FrameType], store: StateStore) -> None:
        self._store = store
        self._numbers: list[_Number] = []
        self._modules: list[_Number] = []
        self._names: dict[type, set[str]] = {}
        self._codes: list[_Code] = []
        self._shared: SharedVariables | None = None
        self._generators: ScriptGenerators | None = None
        self._of_loaders: set[int] = set()
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            reached = _Reached(kept_by(store), self._codes)
            reached.follow(frames[::-1])
            self._mark(reached.objects)
            self._mark_modules(reached.modules)
            self._shared = SharedVariables(frames, reached.functions)
            self._of_loaders = reached.of_loaders
            codes = [(code.code, code.place) for code in self._codes]
            self._generators = ScriptGenerators(reached.generators, codes)

    def _mark(self, objects: Iterable[tuple[str, Any]]) -> None:
        for path, value in objects:
            try:
                owner = weakref.ref(value)
            except TypeError:
                continue
            numbers = _numbers_of(value)
            self._names.setdefault(type(value), set()).update(numbers)
            self._numbers += [_Number(owner, f"{path}.{name}", SeenValue.of(n)) for name, n in numbers.items()]
        del self._numbers[_MOST_NUMBERS:]

    def _mark_modules(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        kept = {
            id(tensor)
            for one in self._store.of_kind(torch.nn.Module)
            for tensor in one.state_dict(keep_vars=True).values()
        }
        for path, module in modules:
            if is_only_shown(module) or _ONLY_MEASURED.search(type(module).__name__):
                continue
            for place, part in module.named_modules(prefix=path):
                numbers = {name: value for name, value in _numbers_in(part).items() if id(value) not in kept}
                owner = weakref.ref(part)
                self._modules += [_Number(owner, f"{place}.{name}", SeenValue.of(n)) for name, n in numbers.items()]
        del self._modules[_MOST_NUMBERS:]

    def moved_memories(self) -> list[str]:
        """Return the names of what has changed in modules outside State, and of tensors that the script counts on."""
        found: list[str] = []
        with contextlib.suppress(Exception):
            found += self._moved_in_modules()
            for path in self._lost():
                number = next(number for number in self._numbers if number.path == path)
                value = getattr(number.owner(), number.name, None)
                found += [path] if isinstance(value, (torch.Tensor, numpy.ndarray)) and value.ndim else []
        return sorted(set(found))

    def _moved_in_modules(self) -> Iterator[str]:
        kept = kept_by(self._store)
        for number in self._modules:
            owner = number.owner()
            if owner is not None and id(owner) not in kept:
                now = _numbers_in(owner)
                if number.name in now and number.value.has_changed(now[number.name]):
                    yield number.path

    @classmethod
    def now(cls, store: StateStore) -> ScriptObjects:
        """Return those of the script that has called this package."""
        return cls(list(script_frames(sys._getframe(1))), store)

    def lost(self) -> list[str]:
        """Return the names of numbers that have changed and that the script counts on, with those of the objects."""
        found: list[str] = []
        with contextlib.suppress(Exception):
            found += self._lost()
            found += self._moved_in_modules()
        return sorted(set(found))

    def moved_generators(self) -> list[str]:
        """Return the names of random generators that are not in State and that the script has drawn from."""
        kept = kept_by(self._store) | self._of_loaders
        return [] if self._generators is None else self._generators.moved(kept)

    def lost_variables(self) -> list[str]:
        """Return the names of variables of the functions around that have changed and that the script counts on."""
        return [] if self._shared is None else self._shared.lost(kept_by(self._store))

    def _lost(self) -> Iterator[str]:
        kept = kept_by(self._store)
        for number in self._numbers:
            owner = number.owner()
            if owner is None or id(owner) in kept or is_only_shown(owner):
                continue
            now = _numbers_of(owner)
            if now.get(number.name) is not None and number.value.has_changed(now[number.name]):
                is_moment = isinstance(now[number.name], float)
                codes = list(self._codes_for(number.name, type(owner)))
                if isinstance(now[number.name], (list, deque)):
                    if _is_collected(number.name, codes):
                        yield number.path
                    continue
                # What is None until it is needed, and is set in one place, is the same wherever it is computed; but not
                # what is the best of several values.
                is_cache = number.value == SeenValue.of(None) and not _is_best(number.name, codes)
                most_sets = 1 if is_cache else 0
                is_average = not _is_of_tensors(_attributes_of(owner).get(number.name)) or _is_moved(number.name, codes)
                if is_average and _is_counted_on(number.name, codes, is_moment, most_sets):
                    yield number.path

    def _codes_for(self, name: str, kind: type) -> Iterator[_Code]:
        """Yield what may use a number of an object: not the methods of other classes that have one of that name."""
        for code in self._codes:
            is_own = code.owner is None or issubclass(kind, code.owner)
            if is_own or name not in self._names.get(code.owner or kind, ()):
                yield code


def kept_by(store: StateStore) -> set[int]:
    """Return the identities of all objects that State keeps, and of their parts."""
    given = [*store.attributes.values(), *(handler.value for handler in store.handlers.values())]
    kept = {id(value) for value in given}
    for value in given:
        if isinstance(value, torch.nn.Module):
            kept |= {id(module) for module in value.modules()}
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        kept |= {id(part) for part in (*islice(parts, _MOST_OBJECTS), *_attributes_of(value).values())}
    return kept


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without calling anything of its class."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return {}


def _objects_in_lists(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the script's objects in lists that are attributes of an object, such as a trainer's callbacks."""
    return [
        (f"{name}.{key}[{number}]", part)
        for key, parts in _attributes_of(value).items()
        if type(parts) in (list, tuple) and len(parts) <= _MOST_PARTS
        for number, part in enumerate(parts)
        if is_of_script(type(part))
    ]


def _counts_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole numbers and floats that are attributes of an optimizer whose state_dict() is torch's."""
    is_torchs = type(optimizer).state_dict.__module__.startswith(_NOT_OF_SCRIPTS)
    numbers = _attributes_of(optimizer).items() if is_torchs else ()
    return {name: value for name, value in numbers if type(value) in (int, float)}


def _numbers_of(value: Any) -> dict[str, Any]:
    """Return the numbers, tensors and arrays that are attributes of an object, or of its class of the script.

    With lists of numbers, and those that are ``None`` or empty, and may be or hold numbers later.
    """
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        if is_of_script(kind):
            found.update(vars(kind))
    found.update(_attributes_of(value))
    numbers = {name: one for name, one in found.items() if one is None or _is_number(one) or _is_of_numbers(one)}
    return numbers | {name: one[next(iter(one))] for name, one in found.items() if _is_of_tensors(one)}


def _is_of_tensors(value: Any) -> bool:
    """Whether a value is a dictionary of tensors, such as an average of weights by name; one of them stands for all."""
    return type(value) is dict and bool(value) and all(isinstance(one, torch.Tensor) for one in value.values())


def _is_of_numbers(value: Any) -> bool:
    return type(value) in (list, deque) and all(type(one) in (int, float) for one in islice(value, _MOST_PARTS))


def _numbers_in(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers, parameters and buffers of a module itself."""
    tensors = {
        name: value for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None
    }
    return {**{name: value for name, value in vars(module).items() if type(value) in (int, float)}, **tensors}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, (numpy.number, numpy.ndarray, torch.Tensor))


def _methods_of(kind: type) -> Iterator[tuple[type, FunctionType]]:
    """Yield the functions of a class and of the classes of the script that it is made from, with that class."""
    for base in kind.__mro__:
        if not is_of_script(base):
            continue
        for member in vars(base).values():
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if type(member) is FunctionType:
                yield base, member


def _globals_of(code: CodeType, variables: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the globals that a code names."""
    names = dict.fromkeys(name for part in parts_of(code) for name in part.co_names)
    return [(name, variables[name]) for name in names if name in variables]


def _is_counted_on(name: str, codes: Iterable[_Code], is_moment: bool, most_sets: int = 0) -> bool:
    """Whether code computes an attribute from its former value, reads it elsewhere, and nowhere sets it anew.

    Args:
        name: Name of the attribute.
        codes: Code that may use it.
        is_moment: It may be one, so that code which reads a clock does not count.
        most_sets: Number of places in which it may be set without being counted on.
    """
    sets, is_read = 0, False
    for one in codes:
        for part in parts_of(one.code):
            if name not in part.co_names or part.co_name in _MAKERS:
                continue
            may_be_moment = is_moment and not _CLOCKS.isdisjoint(part.co_names)
            for uses in _uses(part, name, one.place if part is one.code else 0).values():
                if uses[0] == "set" or (may_be_moment and "set" in uses):
                    return False
                sets += uses.count("set")
                is_read |= "read" in uses
    return sets > most_sets and is_read


def _is_moved(name: str, codes: Iterable[_Code]) -> bool:
    """Whether code sets items of an attribute behind reading some, as an average does; a cache is set alone."""
    parts = [part for one in codes for part in parts_of(one.code) if part.co_name not in _MAKERS]
    return any(uses[0] == "read" and "set" in uses for part in parts for uses in _uses(part, name, 0).values())


def _is_best(name: str, codes: Iterable[_Code]) -> bool:
    """Whether code asks if an attribute, not its length or shape, is less or more than a value, and then sets it."""
    for part in (part for one in codes for part in parts_of(one.code) if name in part.co_names):
        sets = [one.offset for one in dis.get_instructions(part) if one.opname == "STORE_ATTR" and one.argval == name]
        for term in _compared_terms(part):
            is_value = [
                one.opname == "LOAD_ATTR" and one.argval == name and after.opname not in _PARTS_OF_VALUE
                for one, after in pairwise(term)
            ]
            is_called = any(one.opname.startswith("CALL") for one in term)
            if any(is_value) and not is_called and sets and sets[-1] > term[-1].offset:
                return True
    return False


def _is_collected(name: str, codes: Iterable[_Code]) -> bool:
    """Whether code appends to an attribute, and asks whether one of its values is less or more than another value."""
    is_appended = is_compared = False
    for part in (part for one in codes for part in parts_of(one.code) if name in part.co_names):
        found = [one for one in dis.get_instructions(part) if one.opname not in _NO_USES]
        for one, after in pairwise(found):
            is_appended |= one.opname == "LOAD_ATTR" and one.argval == name and after.argval == "append"
        for term in _compared_terms(part):
            names = {one.argval for one in term if one.opname.startswith("LOAD") and isinstance(one.argval, str)}
            is_compared |= name in names and "len" not in names
    return is_appended and is_compared


def _compared_terms(code: CodeType) -> Iterator[list[dis.Instruction]]:
    """Yield what is loaded and computed for each ``<``, ``>``, ``<=`` and ``>=``, which is the last of them."""
    term: list[dis.Instruction] = []
    for one in dis.get_instructions(code):
        if one.opname == "COMPARE_OP" and one.argval in _ORDERS:
            yield [*term, one]
        if one.opname.startswith(("STORE", "POP_", "JUMP", "RETURN", "COMPARE")):
            term = []
        elif one.opname not in _NO_USES:
            term.append(one)


def _uses(code: CodeType, name: str, place: int) -> dict[Any, list[str]]:
    """Return how a code uses an attribute: for each variable, in order, "read", "set", or "add to", before ``+=``.

    The same name may be one of State: ``trainer.count = state.count`` reads the one and sets the other. A constant that
    it sets before its loop is the first value of the next run as well, so that is left out.
    """
    found = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    jumps = [one.argval for one in found if one.offset >= place and one.opcode in _JUMPS]
    loop = min([place, *jumps])  # what the loops under way repeat begins here
    uses: dict[Any, list[str]] = {}
    added: Any = None
    for number, one in enumerate(found):
        if one.argval != name or one.opname not in ("LOAD_ATTR", "STORE_ATTR"):
            continue
        kinds, variable = [before.opname for before in found[max(number - 2, 0) : number]], found[number - 1].argval
        if one.opname == "LOAD_ATTR" and _is_written_into(found[number + 1 :]):
            uses.setdefault(variable[-1] if isinstance(variable, tuple) else variable, ["add to"])
            use = "set"
        elif one.opname == "LOAD_ATTR" and kinds[-1] in ("COPY", "DUP_TOP"):
            use, added = "add to", found[number - 2].argval
            variable = added
        elif one.opname == "LOAD_ATTR":
            use = "read"
        elif kinds[-1] in ("SWAP", "ROT_TWO"):  # the second half of +=
            use, variable = "set", added
        elif one.offset < loop and kinds[0] in ("LOAD_CONST", "LOAD_SMALL_INT"):
            continue
        else:
            use = "set"
        # One instruction may load two variables.
        uses.setdefault(variable[-1] if isinstance(variable, tuple) else variable, []).append(use)
    return uses


def _is_written_into(later: Sequence[dis.Instruction]) -> bool:
    """Whether elements of what was loaded are set, as in ``self.queue[:, place] = keys``; not all, as by ``[:]``."""
    index: list[str] = []
    for one in later:
        if one.opname == "STORE_SUBSCR":
            return bool({"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL"} & set(index))
        if one.opname not in _INDEX:
            return False
        index.append(one.opname)
    return False
