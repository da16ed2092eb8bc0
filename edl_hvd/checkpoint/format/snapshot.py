"""What a checkpoint holds, and what it cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch

from edl_hvd.checkpoint.format.entries import RESERVED_NAME
from edl_hvd.checkpoint.format.shards import DTYPE_NAMES
from edl_hvd.errors import StateError

_LEAVES = frozenset({type(None), bool, int, float, str})
# Of a JSON value.
_KINDS = _LEAVES | {dict, list}
_STRINGS = frozenset({str})


@dataclass(frozen=True)
class Snapshot:
    """The whole state of a training job at one commit. Every rank of a world holds an equal one.

    Attributes:
        tensors: Host tensors by name; any shape and layout in memory, also views of one another. They
            come back contiguous, each with memory of its own.
        plain: State that is not tensors, as a JSON value: dictionaries with string keys, lists, strings, whole
            numbers, floats (infinities and NaN included), booleans, ``None``.
        step: Optimizer steps since the job began.
        epoch: Epoch the job is in.
        samples: Samples consumed since the job began.
        metrics: Values that the training measured last, by name; any floats.
    """

    tensors: Mapping[str, torch.Tensor]
    plain: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    samples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class DeferredSnapshot(Protocol):
    """A snapshot whose tensors hold what they should only when :meth:`materialise` has returned."""

    @property
    def value(self) -> Snapshot:
        """The snapshot."""

    def materialise(self) -> None:
        """Have the tensors hold what they should. Any thread; blocks for a copy in memory.

        Raises:
            StateError: That is not possible any more.
        """


def check_snapshot(snapshot: Snapshot, seen: Mapping[str, torch.Tensor] | None = None) -> None:
    """Refuse what would not come back as it was. Looks at names and types, not at contents; for these, ``check_plain``.

    Args:
        snapshot: Snapshot that is to be written.
        seen: Tensors of one that was not refused: if these are the same, they are not looked at again.

    Raises:
        StateError: With one line per problem.
    """
    problems = [
        f"{name}={getattr(snapshot, name)!r}; expected a whole number of at least 0"
        for name in ("step", "epoch", "samples")
        if type(getattr(snapshot, name)) is not int or getattr(snapshot, name) < 0
    ]
    if seen is None or not _are_same(snapshot.tensors, seen):
        for name, tensor in snapshot.tensors.items():
            if not _is_usual(name, tensor):
                problems.extend(_tensor_problems(name, tensor))
    problems.extend(
        f"metric {name!r} is {value!r}; expected a float under a name"
        for name, value in snapshot.metrics.items()
        if type(name) is not str or type(value) is not float
    )
    _refuse(problems)


def check_plain(plain: dict[str, Any]) -> None:
    """Refuse plain state that is no JSON value. Takes longer than all the rest that is to be checked.

    Raises:
        StateError: With one line per problem.
    """
    if not _is_json(plain):
        _refuse(list(_plain_problems(plain, "plain")))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise StateError("this state cannot be checkpointed:\n" + "\n".join(f"  {problem}" for problem in problems))


def _are_same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return list(some) == list(others) and all(map(is_, some.values(), others.values()))


def _is_json(value: Any) -> bool:
    """What ``_plain_problems`` finds nothing in; an optimizer has thousands of values. Goes level by level."""
    level = [value]
    while level:
        if not _KINDS.issuperset(map(type, level)):
            return False
        mappings = [item for item in level if type(item) is dict]
        if not _STRINGS.issuperset(map(type, chain.from_iterable(mappings))):
            return False
        lists = [item for item in level if type(item) is list]
        level = [*chain.from_iterable(map(dict.values, mappings)), *chain.from_iterable(lists)]
    return True


def _is_usual(name: Any, tensor: Any) -> bool:
    """There are hundreds, and the training waits: of nearly all this says in a third of the time that they are fine."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in DTYPE_NAMES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and type(name) is str
        and name.isascii()
        and name != RESERVED_NAME
    )


def _tensor_problems(name: Any, tensor: Any) -> Iterator[str]:
    if not isinstance(name, str) or name == RESERVED_NAME or not _is_unicode(name):
        yield f"tensor name {name!r}; expected a string of valid Unicode other than {RESERVED_NAME!r}"
    if not isinstance(tensor, torch.Tensor):
        yield f"tensor {name!r} is a {type(tensor).__name__}; expected a torch.Tensor"
    elif tensor.layout != torch.strided:
        yield f"tensor {name!r} has layout {tensor.layout}; expected a dense one, convert it with to_dense()"
    elif tensor.device.type != "cpu":
        yield f"tensor {name!r} is on {tensor.device}; expected host memory"
    elif tensor.dtype not in DTYPE_NAMES:
        accepted = ", ".join(sorted(DTYPE_NAMES.values()))
        yield f"tensor {name!r} is {tensor.dtype}, which safetensors cannot hold; expected one of {accepted}"


def _plain_problems(value: Any, where: str) -> Iterator[str]:
    if type(value) in _LEAVES:
        return
    if type(value) is list:
        for index, item in enumerate(value):
            yield from _plain_problems(item, f"{where}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                yield f"{where} has the key {key!r}; expected strings as keys, JSON would turn it into one"
            yield from _plain_problems(item, f"{where}[{key!r}]")
    else:
        yield (
            f"{where} is a {type(value).__name__}; expected a JSON value (dict, list, str, int, float, bool or None)"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
