"""Values of the data sets that the loops over batches read, which the script sets anew while it trains.

Such as the samples that a curriculum keeps, or pseudo-labels. What is set behind a loop over batches, or at the top of
one epoch, as in ``if epoch == 3:``, a worker that joins later has not. What the top of an epoch computes from the
weights, it computes again where the epoch is continued.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy
import torch

from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.script_locals import is_of_script, script_frames, variables_of
from edl_hvd.worker.script_objects import kept_by

_MOST_BYTES, _MOST_ITEMS, _MOST_VALUES, _DEEPEST = 1 << 24, 1 << 17, 100, 3
_READERS = ("__getitem__", "__getitems__", "__len__", "__iter__")
_MAKERS = ("__init__", "__post_init__", "__setstate__")
_NUMBERS = (int, float, numpy.number)
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_found_by_class: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Value:
    """A value of a data set. Neither is held: the script may want them freed.

    Attributes:
        owner: Data set whose attribute it is.
        mark: Changes with the value, as far as that can be known without reading a large tensor.
        identity: Of the value, or of the tuple's item.
        is_array: Whether it is an array, a tensor or a list.
        is_option: Whether it is a truth value, or something to call, such as a transform.
        content: Checksum of its bytes; ``None`` where it was not asked for, or is not known.
    """

    owner: weakref.ref[Any]
    mark: Any
    identity: int
    is_array: bool
    content: int | None = None
    is_option: bool = False


class DataSetValues:
    """The values of the data sets of one job, from one loop over batches to the next.

    Args:
        store: State of the job.
        warn_once: Called with what a warning is about, and its text.
    """

    def __init__(self, store: StateStore, warn_once: Callable[[str, str], None]) -> None:
        self._store = store
        self._warn_once = warn_once
        self._tops: dict[str, tuple[int, int]] = {}  # epoch and checksum of what its top has set
        self.begin_function()

    def begin_function(self) -> None:
        """The elastic function is about to run, for the first time or again."""
        self._read: dict[str, _Value] = {}  # as the last loop over batches began
        self._before_top: dict[str, _Value] = {}
        self._behind: dict[str, _Value] = {}  # set behind that loop, unless the next top sets it again
        self._set_at_top: set[str] = set()
        self._set_before_loop: set[str] = set()
        self._data_sets: dict[str, weakref.ref[Any]] = {}

    def begin_epoch(self) -> None:
        """The body of an epoch begins: the script has come through everything behind the loop before."""
        with contextlib.suppress(Exception):  # a script may hold anything, and this is no more than advice
            self._before_top = self._present()
            self._behind = _no_options(self._changed(self._read, self._before_top))

    def begin_batches(self, data_set: Any, epoch: int, is_continued: bool) -> None:
        """A loop over the batches of a data set begins.

        Args:
            data_set: Data set of its loader.
            epoch: Number of the epoch.
            is_continued: Whether the top of the epoch has run before, in another world.
        """
        with contextlib.suppress(Exception):
            frames = list(script_frames(sys._getframe(1)))
            name = _name_of(data_set, frames)
            self._data_sets[name] = weakref.ref(data_set)
            now = self._present()
            set_at_top = self._changed(self._before_top, now)
            at_top = _no_options(set_at_top)
            self._set_before_loop = _set_before_loop(frames)
            self._warn_of_lost(self._behind.keys() - at_top.keys())
            self._warn_of_some(at_top, now)
            self._warn_of_one_epoch(set_at_top, frames, epoch)
            unknown = {path: value for path, value in now.items() if path not in self._before_top}
            self._compare(_of({**at_top, **_no_options(unknown)}, name), epoch, is_continued)
            self._read, self._before_top, self._behind = now, now, {}

    def end_function(self) -> None:
        """The function has been left, and is going to run again in another world."""
        with contextlib.suppress(Exception):
            changed = _no_options(self._changed(self._read, self._present()))
            # The next top may set them again, as it does numbers that are others while the script validates.
            again = {
                path for path, value in changed.items() if not value.is_array or _key(path) in self._set_before_loop
            }
            self._warn_of_lost(changed.keys() - again - self._set_at_top)
        self.begin_function()

    def _present(self) -> dict[str, _Value]:
        kept = kept_by(self._store)
        found: dict[str, _Value] = {}
        for name, reference in self._data_sets.items():
            data_set = reference()
            if data_set is not None and id(data_set) not in kept:
                found.update(_values_of(name, data_set, kept))
        return found

    def _changed(self, before: dict[str, _Value], now: dict[str, _Value]) -> dict[str, _Value]:
        """Return the values that are others than before, without those into which alone was written and State keeps."""
        kept = kept_by(self._store)
        return {
            path: value
            for path, value in now.items()
            if path in before
            and value.mark != before[path].mark
            and not (value.identity == before[path].identity and value.identity in kept)
        }

    def _warn_of_lost(self, paths: Iterable[str]) -> None:
        """Warn of what has been set behind the loop, unless it is from State and the top sets it as well."""
        lost = sorted(paths)
        kept, present = kept_by(self._store), self._present() if lost else {}
        names = [
            path
            for path in lost
            if path in present and not (present[path].identity in kept and _key(path) in self._set_before_loop)
        ]
        if names:
            self._warn(names[0], "has been set anew behind the loop over batches, and a worker that joins then has not")

    def _warn_of_some(self, at_top: dict[str, _Value], now: dict[str, _Value]) -> None:
        """Warn of arrays that an earlier top has set, and this one has not."""
        kept = kept_by(self._store)
        names = [
            path
            for path in sorted(self._set_at_top - at_top.keys())
            if path in now and now[path].is_array and now[path].identity not in kept
        ]
        if names:
            self._warn(
                names[0], "has been set at the top of an earlier epoch only, and a worker that joins later has not"
            )
        self._set_at_top |= at_top.keys()

    def _warn_of_one_epoch(self, at_top: dict[str, _Value], frames: Iterable[FrameType], epoch: int) -> None:
        """Warn of what this top has set and that of no other epoch sets, such as the size of images."""
        for path, value in sorted(at_top.items()):
            if _key(path) in _set_in_one_epoch(frames, type(value.owner())):
                self._warn_once(
                    "data set.one",
                    f"{path}, of a data set that the loop reads, has been set at the top of epoch {epoch} only, and a "
                    "worker that joins in a later one, or a job that is resumed there, has not what it was set to, so "
                    "it may train on something else; set it at the top of the later ones, too, as in "
                    f"`if epoch >= {epoch}:`",
                )

    def _warn(self, path: str, what: str) -> None:
        key = _key(path)
        self._warn_once(
            "data set",
            f"{path}, of a data set that the loop reads, {what} what it was set to, so it trains on something else; "
            f"keep it in State, as state.{key} (an array as a tensor), and set it from there at the top of each epoch",
        )

    def _compare(self, values: dict[str, _Value], epoch: int, is_continued: bool) -> None:
        """Compare what a top has set with what it had set before the world changed."""
        for path, value in values.items():
            content = _content_of(value.owner(), path)
            if content is None:
                continue
            before = self._tops.get(path)
            if is_continued and before is not None and before[0] == epoch and before[1] != content:
                key = _key(path)
                self._warn_once(
                    "data set.top",
                    f"the top of epoch {epoch}, which is continued, has set {path}, of a data set that the loop reads, "
                    "to something else than when it ran before, such as labels from weights in mid-training, so a job "
                    f"without interruption learns something else; give the tensor to State, as State({key}=…, …), make "
                    f"the data set of it, and write into it, as state.{key}[:] = …: that is put back",
                )
            else:
                self._tops[path] = epoch, content


def _no_options(values: dict[str, _Value]) -> dict[str, _Value]:
    return {path: value for path, value in values.items() if not value.is_option}


def _of(values: dict[str, _Value], name: str) -> dict[str, _Value]:
    return {path: value for path, value in values.items() if path.startswith(f"{name}.")}


def _key(path: str) -> str:
    """Return the name of an attribute, also of one that is a tuple with the value."""
    return path.rpartition(".")[2].partition("[")[0]


def _name_of(data_set: Any, frames: Iterable[FrameType]) -> str:
    """How the script calls a data set; by its class where it has no name for it."""
    for frame in frames:
        for variables in (variables_of(frame), frame.f_globals):
            for name, value in variables.items():
                if value is data_set:
                    return name
                if isinstance(value, torch.utils.data.DataLoader) and value.dataset is data_set:
                    return f"{name}.dataset"
    return type(data_set).__name__


def _values_of(path: str, data_set: Any, kept: set[int], depth: int = 0) -> Iterator[tuple[str, _Value]]:
    """Yield the numbers, arrays, tensors and lists of a data set, and of those inside it, without its caches."""
    owner, own = weakref.ref(data_set), _set_by_reading(type(data_set))
    for key, value in list(vars(data_set).items())[:_MOST_VALUES]:
        if key in own or (key.startswith("_") and not is_of_script(type(data_set))):
            continue
        place = f"{path}.{key}"
        parts = value if isinstance(value, (list, tuple)) and len(value) <= _MOST_VALUES else ()
        if isinstance(value, torch.utils.data.Dataset):
            parts = (value,)
        inner = [part for part in parts if isinstance(part, torch.utils.data.Dataset) and id(part) not in kept]
        if inner and depth < _DEEPEST:
            for part in inner:
                yield from _values_of(place, part, kept, depth + 1)
        elif isinstance(value, tuple):
            for number, part in enumerate(parts):
                if (mark := _mark(part)) is not None:
                    yield f"{place}[{number}]", _Value(owner, mark, id(part), not isinstance(part, _NUMBERS))
        elif (mark := _mark(value)) is not None:
            yield place, _Value(owner, mark, id(value), not isinstance(value, _NUMBERS))
        elif isinstance(value, bool) or callable(value):
            yield (
                place,
                _Value(owner, value if isinstance(value, bool) else id(value), id(value), False, is_option=True),
            )


def _mark(value: Any) -> Any:
    """Return what tells two values apart; ``None`` for one that is not watched."""
    if isinstance(value, bool):
        return None
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (numpy.ndarray, list)):
        return id(value), _checksum(value)
    return None


def _content_of(data_set: Any, path: str) -> int | None:
    """Return a checksum of an attribute of a data set, or of an item of it."""
    value, place = vars(data_set).get(_key(path)), path.rpartition("[")[2] if path.endswith("]") else ""
    return _checksum(value[int(place.rstrip("]"))] if place and value is not None else value)


def _checksum(value: Any) -> int | None:
    """Return a checksum of the elements; ``None`` where they are many, or on a GPU, or objects."""
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or value.layout is not torch.strided or value.nbytes > _MOST_BYTES:
            return None
        data = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return zlib.crc32(data, len(value.shape))
    if isinstance(value, numpy.ndarray):
        return None if value.nbytes > _MOST_BYTES or value.dtype.hasobject else zlib.crc32(value.tobytes())
    if isinstance(value, list):
        is_plain = len(value) <= _MOST_ITEMS and {int, float, str}.issuperset(map(type, value))
        return zlib.crc32(repr(value).encode()) if is_plain else len(value)
    return zlib.crc32(repr(value).encode()) if isinstance(value, _NUMBERS) else None


def _set_by_reading(kind: type) -> set[str]:
    """Return the attributes that a data set may set while samples are read, such as a cache."""
    if kind in _found_by_class:
        return _found_by_class[kind]
    methods: dict[str, list[CodeType]] = {}  # also those that others of the same name may call, as super() does
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, FunctionType):
                methods.setdefault(name, []).append(member.__code__)
    reached, pending = set(), [name for name in _READERS if name in methods]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            used = [other for code in methods[name] for other in code.co_names]
            pending += [other for other in used if other in methods and other not in _MAKERS]
    names: set[str] = set()
    for code in [code for name in reached for code in methods[name]]:
        found = list(dis.get_instructions(code))
        names |= {
            one.argval
            for number, one in enumerate(found)
            if one.opname == "STORE_ATTR" or (one.opname == "LOAD_ATTR" and _is_written_into(found[number + 1 :]))
        }
    _found_by_class[kind] = names
    return names


def _is_written_into(later: Iterable[dis.Instruction]) -> bool:
    """Whether an item of what was loaded is set, as in ``self.cache[int(place)] = sample``, and none is read."""
    for one in later:
        if one.opname.startswith("STORE") or one.opname.startswith("RETURN"):
            return one.opname in ("STORE_SUBSCR", "STORE_SLICE")
        if one.opname in ("BINARY_SUBSCR", "BINARY_SLICE") or (one.opname == "BINARY_OP" and one.argrepr == "[]"):
            return False
    return False


def _set_before_loop(frames: Iterable[FrameType]) -> set[str]:
    """Return the attributes that the functions with the loop set before it."""
    return {
        str(one.argval)
        for frame in frames
        for one in dis.get_instructions(frame.f_code)
        if one.opname == "STORE_ATTR" and one.offset < frame.f_lasti
    }


def _set_in_one_epoch(frames: Iterable[FrameType], kind: type) -> set[str]:
    """Return the attributes that the functions with the loop set before it in certain epochs alone.

    Args:
        frames: Frames of these functions.
        kind: Class of the data set, whose methods they may call.
    """
    setters = {
        name: {one.argval for one in dis.get_instructions(member.__code__) if one.opname == "STORE_ATTR"}
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, FunctionType) and name not in _MAKERS
    }
    in_one: set[str] = set()
    in_all: set[str] = set()
    for frame in frames:
        place, found = frame.f_lasti, list(dis.get_instructions(frame.f_code))
        loop = min((one.argval for one in found if one.offset >= place and one.opcode in _JUMPS), default=place)
        begin = loop if loop < place else 0  # what stands before the loop over epochs sets the first values
        blocks = list(_blocks_of_one_epoch(found))
        for one in found:
            if begin <= one.offset < place:
                name = str(one.argval)
                names = {name} if one.opname == "STORE_ATTR" else setters.get(name, set())
                (in_one if any(first < one.offset < end for first, end in blocks) else in_all).update(names)
    return in_one - in_all


def _blocks_of_one_epoch(code: Sequence[dis.Instruction]) -> Iterator[tuple[int, int]]:
    """Yield from where to where a function runs in certain epochs alone: behind ``if epoch == 3:``."""
    found = [one for one in code if one.opname != "EXTENDED_ARG"]
    counted = {after.argval for one, after in pairwise(found) if one.opname.startswith("FOR_ITER")} | {"epoch"}
    for number, (one, after) in enumerate(pairwise(found)):
        is_equal = one.opname == "COMPARE_OP" and "==" in one.argrepr
        is_among = one.opname == "CONTAINS_OP" and not one.arg
        if (is_equal or is_among) and after.opname.startswith("POP_JUMP") and "IF_FALSE" in after.opname:
            for before in reversed(found[:number]):
                if before.opname.startswith(("STORE", "POP", "FOR_ITER", "JUMP", "RETURN")):
                    break
                if before.opname.startswith("LOAD") and before.argval in counted:
                    yield after.offset, after.argval
                    break
