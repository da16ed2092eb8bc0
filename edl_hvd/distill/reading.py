"""Micro-batches as a loader yields them, each with its place and with what a teacher sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.distill.indices import Indices
from edl_hvd.distill.kept import KeptPart
from edl_hvd.distill.outputs import describe, named, row_types, to_arrays, to_tensors
from edl_hvd.distill.place import Place
from edl_hvd.errors import UsageError
from edl_hvd.frames import Array, ArrayType

FindIndices: TypeAlias = Callable[[], Sequence[int]]


@dataclass(frozen=True)
class PartToSend:
    """What the teachers of one name get of a micro-batch.

    Attributes:
        name: Name of the teachers; empty if there is one kind of them.
        rows: Numbers of the samples in the micro-batch; ``None``: all.
        place: Place of the micro-batch, with the number of these samples.
        arrays: What is sent.
        number: Number of its task.
        kept: What is kept of its answer; ``None`` where none is kept.
        checks: Checks of its inputs; empty before they are computed.
    """

    name: str
    rows: tuple[int, ...] | None
    place: Place
    arrays: tuple[Array, ...]
    number: int = -1
    kept: KeptPart | None = None
    checks: tuple[int, ...] = ()

    def indices_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a micro-batch's samples that belong to the part."""
        return whole if self.rows is None else tuple(whole[row] for row in self.rows)


@dataclass(frozen=True)
class Item:
    """A micro-batch that was read.

    Attributes:
        value: What the loader yielded.
        place: Place of it.
        find_indices: Function that returns the indices of the samples, none where they are not known.
        parts: What is sent to teachers.
    """

    value: Any
    place: Place
    find_indices: FindIndices
    parts: tuple[PartToSend, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """Samples that it is made of; empty where they are not known."""
        return tuple(self.find_indices())


@dataclass(frozen=True)
class Sending:
    """What teachers see of a batch.

    Attributes:
        send: Function of a batch that returns a tensor, or a dict of tensors; or ``Indices``.
        names: Names of the teachers; one empty name if there is one kind of them.
        route: Function of a batch that returns the name for each sample; ``None``: each gets all.
    """

    send: Callable[[Any], Any] | Indices
    names: tuple[str, ...] = ("",)
    route: Callable[[Any], Any] | None = None

    def keyed(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """What kept answers to these are found by."""
        return self.send.keyed(arrays) if isinstance(self.send, Indices) else arrays


def tells_indices(batch_sampler: Any) -> bool:
    """Whether a batch sampler can be iterated beside its loader, and yields the same indices as there.

    One that draws the order as it is iterated can not: it would yield others, and take numbers of the generator that
    the script has seeded. Nor can an iterator, which the loader would find emptied.
    """
    if isinstance(batch_sampler, (ElasticBatchSampler, EvaluationSampler, list, tuple)):
        return True
    if type(batch_sampler) is not BatchSampler:
        return False
    return isinstance(batch_sampler.sampler, (SequentialSampler, DistributedSampler, list, tuple, range))


def describe_sampler(batch_sampler: Any) -> str:
    """What a batch sampler is, for a message."""
    inner = getattr(batch_sampler, "sampler", None)
    return type(batch_sampler).__name__ + ("" if inner is None else f" of a {type(inner).__name__}")


@dataclass(frozen=True)
class _Named:
    """A micro-batch that the sampler names: its place, and what returns its indices."""

    place: Place
    find_indices: FindIndices


def _name_all(batch_sampler: Any, number: int) -> Iterator[_Named]:
    """What the loader is going to yield. The indices themselves are computed by the loader already."""
    if type(batch_sampler) is ElasticBatchSampler:
        for one in batch_sampler.dealt():
            yield _Named(Place(one.seed, one.epoch, one.position, one.samples, one.order.name), one.indices)
        return
    position = 0
    for indices in batch_sampler:
        place = Place(
            getattr(indices, "seed", 0), getattr(indices, "epoch", number), getattr(indices, "position", position),
            len(indices), getattr(indices, "order", ""),
        )  # fmt: skip
        yield _Named(place, partial(_as_it_is, indices))
        position += len(indices)


def _as_it_is(indices: Sequence[int]) -> Sequence[int]:
    return indices


class Reading:
    """The loader's items, with their places. One thread at a time."""

    def __init__(self, loader: Any, batch_sampler: Any, sending: Sending, number: int) -> None:
        self.is_threaded = getattr(loader, "num_workers", 0) > 0
        # Both in the thread of the script, which forks the loader's processes. The sampler is asked at once, as its
        # position may move before the next item is taken.
        self._named = _name_all(batch_sampler, number) if tells_indices(batch_sampler) else None
        self._first = None if self._named is None else next(self._named, None)
        self._items: Iterator[Any] = iter(loader)
        self.sending, self._number, self._position = sending, number, 0
        self._rows: tuple[ArrayType, ...] | None = None
        first = 0 if self._first is None else self._first.place.samples
        self.largest = getattr(getattr(batch_sampler, "policy", None), "micro_batch", None) or first
        if self._named is None:
            size = getattr(batch_sampler, "batch_size", None)
            self.largest = size if isinstance(size, int) else 0

    def next(self) -> Item | None:
        """The next item; ``None`` at the end."""
        try:
            value = next(self._items)
        except StopIteration:
            return None
        if self._named is None:
            sent = None if isinstance(self.sending.send, Indices) else self.sending.send(value)
            place = Place(0, self._number, self._position, _samples_of(sent))
            self._position += place.samples
            return self._item(value, sent, place, tuple)
        named = self._first if self._first is not None else next(self._named, None)
        self._first = None
        if named is None:
            raise UsageError("the loader yields more batches than its batch_sampler; expected one for each")
        sent = None if isinstance(self.sending.send, Indices) else self.sending.send(value)
        return self._item(value, sent, named.place, named.find_indices)

    def end(self) -> None:
        """End the loader's processes; its iterator, without another reference, waits for them."""
        self._items = iter(())

    def _item(self, value: Any, sent: Any, place: Place, find_indices: FindIndices) -> Item:
        self.largest = max(self.largest, place.samples)
        return Item(value, place, find_indices, self._parts(value, sent, place, find_indices))

    def _parts(self, value: Any, sent: Any, place: Place, find_indices: FindIndices) -> tuple[PartToSend, ...]:
        arrays, names = self._to_send(value, sent, place, find_indices), self.sending.names
        if self.sending.route is None:
            return tuple(PartToSend(name, None, place, arrays) for name in names)
        given = self.sending.route(value)
        keys = [str(key) for key in (given.tolist() if isinstance(given, torch.Tensor) else given)]
        wrong = sorted(set(keys) - set(names))
        if len(keys) != place.samples or wrong:
            raise UsageError(
                f"route returned {', '.join(wrong) or f'{len(keys)} names'} for {place}; expected one of "
                f"{', '.join(names)} for each of its {place.samples} samples"
            )
        tensors, parts = to_tensors(arrays), []
        for name in names:
            rows = tuple(row for row, key in enumerate(keys) if key == name)
            if rows:
                chosen = to_arrays({key: one[list(rows)] for key, one in tensors.items()})
                parts.append(PartToSend(name, rows, replace(place, samples=len(rows)), chosen))
        return tuple(parts)

    def _to_send(self, value: Any, sent: Any, place: Place, find_indices: FindIndices) -> tuple[Array, ...]:
        if isinstance(self.sending.send, Indices):
            return self.sending.send.arrays_of(value, find_indices())
        try:
            arrays = to_arrays(named(sent))
        except UsageError as error:
            raise UsageError(
                f"send returned {describe(sent)} for {place}: {error}; expected a tensor, or a dict of tensors, such "
                "as send=lambda batch: batch[0]"
            ) from error
        for array in arrays:
            if array.type.shape[:1] != (place.samples,):
                raise UsageError(
                    f"send returned {array.type} for {place}, which has {place.samples} samples; expected the batch as "
                    "the first dimension"
                )
        rows = row_types(arrays)
        if self._rows not in (None, rows):
            raise UsageError(
                f"send returned {', '.join(map(str, rows))} per sample for {place}, and "
                f"{', '.join(map(str, self._rows or ()))} before; expected one shape and type in the whole job: pad "
                "all batches to one length, not each to its own longest sample"
            )
        self._rows = rows
        return arrays


def _samples_of(sent: Any) -> int:
    """The number of samples of a batch whose indices are not known: as many as what is sent has.

    What cannot travel, and so has none, is told where it is sent.
    """
    first = next(iter(sent.values()), None) if isinstance(sent, Mapping) else sent
    return len(first) if isinstance(first, torch.Tensor) and first.dim() and not first.is_nested else 1


def held_bytes(item: Item) -> int:
    """Bytes of the tensors of an item, and of what is sent, memory that both share counted once."""
    sizes: dict[int, int] = {}

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes[value.data_ptr()] = max(value.nbytes, sizes.get(value.data_ptr(), 0))
        elif isinstance(value, Mapping):
            for one in value.values():
                note(one)
        elif isinstance(value, (tuple, list)):
            for one in value:
                note(one)

    note(item.value)
    for part in item.parts:
        note(list(to_tensors(part.arrays).values()))
    return sum(sizes.values())
