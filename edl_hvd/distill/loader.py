"""A loader whose items carry a teacher's answer, in the order of the sampler.

Each ``iter()`` is a pass: micro-batches are read ahead, named by their places, sent to teachers, and yielded in order
with their answers. Nothing is journalled, since the position moves only when ``State`` has counted a step: a new pass
begins there, and what was read ahead is dropped. Answers that the last pass had left are used again by their places.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd import events
from edl_hvd.distill.calling import Calling, Outlook, Wishes
from edl_hvd.distill.finding import Finding
from edl_hvd.distill.outputs import describe, find_nan, named, row_types, to_arrays, to_tensors
from edl_hvd.distill.place import Place, show_indices
from edl_hvd.distill.teacher import Teacher, check_probe
from edl_hvd.distill.teachers import Teachers
from edl_hvd.distill.window_events import Asked
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frames import Array, ArrayType
from edl_hvd.settings import Launch, Settings
from edl_hvd.tensor_threads import TensorThread

_LOOK_S = 0.25
_LASTING_S = 5.0
# When no address can ever become a teacher, nothing is gained by waiting longer; the source may be half written.
_ANSWERS_EVERY_S = 30.0
_END_S = 5.0
# Longest wait for a reading thread, which ends before its next item.
_READ_AT_ONCE = 2


@dataclass(frozen=True)
class _Item:
    """A micro-batch that was read.

    Attributes:
        value: What the loader yielded.
        place: Place of it.
        indices: Samples that it is made of.
        arrays: What is sent to a teacher.
        number: Number of its task.
    """

    value: Any
    place: Place
    indices: tuple[int, ...]
    arrays: tuple[Array, ...]
    number: int = -1


class DistillLoader:
    """Loader that yields each batch of another loader together with the teachers' answer; original here.

    A batch ``(images, target)`` becomes ``(images, target, answer)``; a dict gets the key "answer"; anything else
    becomes ``(batch, answer)``. It goes where the other loader would: ``state.batches(loader)``,
    ``state.steps(loader)``, or a plain loop. Every rank makes one, outside of the loop over epochs; it is not
    collective. Iterating blocks while no answer is there.

    Args:
        loader: ``DataLoader`` with a ``batch_sampler``, or another loader that yields batches in the sampler's order.
        teachers: Teachers that answer.
        send: Function of a batch that returns what a teacher sees of it: a tensor, or a dict of tensors, whose first
            dimension is the batch.

    Raises:
        UsageError: The loader has no batch sampler, or yields batches in another order than it.
    """

    def __init__(self, loader: Any, teachers: Teachers, *, send: Callable[[Any], Any]) -> None:
        if getattr(loader, "batch_sampler", None) is None:
            raise UsageError(
                f"{describe(loader)} has no batch_sampler, so the place of a batch is not known; expected "
                "DataLoader(dataset, batch_sampler=batches)"
            )
        if getattr(loader, "in_order", True) is False:
            raise UsageError(
                "the DataLoader has in_order=False, so its batches do not come in the sampler's order; expected the "
                "default, in_order=True"
            )
        self.loader, self.teachers, self.send = loader, teachers, send
        self.batch_sampler = loader.batch_sampler
        self.dataset = getattr(loader, "dataset", None)
        self._passes = 0
        self._open = _Open()
        # Also at the end of the process, before the reading thread would be in its way.
        weakref.finalize(self, self._open.close)

    def __len__(self) -> int:
        """The number of batches, as the loader inside has it. Any rank; not collective."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; the one before ends. Any rank; not collective.

        Raises:
            NoTeacherError: While iterating: there was no answer for as long as ``patience``.
            UsageError: While iterating: what ``send`` returns cannot travel, or several teachers fail on one input.
        """
        is_open = self._open
        is_open.end_pass()
        self._passes += 1
        reading = _Reading(self.loader, self.batch_sampler, self.send, self._passes - 1)
        if self.teachers.source:
            if is_open.service is None:
                is_open.service = _Service(self.teachers)
            is_open.current = _Pass(reading, is_open.service)
        else:
            if is_open.local is None:
                assert self.teachers.local is not None
                is_open.local = Teacher.of(self.teachers.local())
            is_open.current = _LocalPass(reading, is_open.local, self.teachers)
        return _Iterator(self, is_open.current)

    def close(self) -> None:
        """End the pass and all connections; a loader that is not used any more does so by itself. Not collective."""
        self._open.close()


class _Iterator:
    """What a script iterates over. It keeps the loader, which a pass does not know, for as long as it is used."""

    def __init__(self, loader: DistillLoader, current: _Pass | _LocalPass) -> None:
        self._loader, self._pass = loader, current

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._pass.next()


@dataclass
class _Open:
    """What a loader has open; it does not know the loader."""

    current: _Pass | _LocalPass | None = None
    service: _Service | None = None
    local: Teacher | None = None

    def end_pass(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None

    def close(self) -> None:
        self.end_pass()
        if self.service is not None:
            self.service.close()
            self.service = None


class _Reading:
    """The loader's items, with their places. One thread at a time."""

    def __init__(self, loader: Any, batch_sampler: Any, send: Callable[[Any], Any], number: int) -> None:
        self.is_threaded = getattr(loader, "num_workers", 0) > 0
        # Both in the thread of the script, which forks the loader's processes. The sampler is asked at once, as its
        # position may move before the next item is taken.
        places = iter(batch_sampler)
        self._first = next(places, None)
        self._places = places
        self._items = iter(loader)
        self._send, self._number, self._position = send, number, 0
        self._rows: tuple[ArrayType, ...] | None = None
        self.largest = getattr(getattr(batch_sampler, "policy", None), "micro_batch", None) or len(self._first or ())

    def next(self) -> _Item | None:
        """The next item; ``None`` at the end."""
        try:
            value = next(self._items)
        except StopIteration:
            return None
        indices = self._first if self._first is not None else next(self._places, None)
        self._first = None
        if indices is None:
            raise UsageError("the loader yields more batches than its batch_sampler; expected one for each")
        place = Place(
            getattr(indices, "seed", 0), getattr(indices, "epoch", self._number),
            getattr(indices, "position", self._position), len(indices), getattr(indices, "order", ""),
        )  # fmt: skip
        self._position += len(indices)
        self.largest = max(self.largest, len(indices))
        return _Item(value, place, tuple(indices), self._to_send(value, place))

    def _to_send(self, value: Any, place: Place) -> tuple[Array, ...]:
        sent = self._send(value)
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
                f"{', '.join(map(str, self._rows or ()))} before; expected one shape and type: pad to the longest"
            )
        self._rows = rows
        return arrays


class _Service:
    """The connections of one loader, from its first pass on."""

    def __init__(self, teachers: Teachers) -> None:
        self.teachers = teachers
        self.log = events.EventLog(Settings.from_environment().events)
        launch = Launch.from_environment()
        wishes = Wishes(
            job=launch.run, student=f"{launch.host}:{launch.local_rank}", outputs=teachers.outputs,
            exact=teachers.exact, fingerprint=teachers.fingerprint,
        )  # fmt: skip
        self.calling = Calling(wishes, teachers.token, teachers.limit_bytes, find_nan, self._tell)
        self.finding = Finding(teachers.source, teachers.port, self.calling.set_addresses, self.calling.blame)
        self.known: dict[Place, tuple[Array, ...]] = {}
        self.rows: tuple[ArrayType, ...] | None = None

    def _tell(self, event: events.Event) -> None:
        with suppress(OSError):  # a full disk is no reason to lose a teacher
            self.log.emit(event)

    def tell(self, event: events.Event) -> None:
        """Write an event."""
        self._tell(event)

    def close(self) -> None:
        """End the threads and the connections."""
        self.finding.close()
        self.calling.close()
        self.log.close()


class _Pass:
    """One pass with a service; ``close`` ends it, and may be called again."""

    def __init__(self, reading: _Reading, service: _Service) -> None:
        self._reading, self._service, self._calling = reading, service, service.calling
        self._items: deque[_Item] = deque()
        self._error: BaseException | None = None
        self._is_read = self._is_closed = self._is_through = False
        self._waited_s = 0.0
        self._samples = 0
        self._began_s = self._told_s = time.monotonic()
        self._thread: TensorThread | None = None
        if reading.is_threaded:
            # It does not know the loader, so that one that is forgotten ends its pass.
            self._thread = TensorThread(self._read_all, "edl_hvd distill reading")
            self._thread.start()

    def next(self) -> Any:
        """The next batch with its answer.

        Raises:
            StopIteration: There is none.
            UsageError: The pass was ended before its end, by another one.
        """
        if self._is_closed and self._is_through:
            raise StopIteration
        if self._is_closed:
            raise _ended_early()
        self._calling.handle(Asked())
        if self._thread is None:
            self._read_some()
        item = self._wait_for_item()
        if item is None:
            self._is_through = True
            self.close()
            if self._error is not None:
                raise self._error
            raise StopIteration
        answer = self._wait_for_answer(item)
        with self._calling.changed:
            self._items.popleft()
        self._samples += item.place.samples
        self._tell_now_and_then()
        return _join(item.value, self._service.teachers.reduction.restore(to_tensors(answer)))

    def close(self) -> None:
        """End the pass; answers that are left are kept for the next one."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._calling.changed:
            self._calling.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        left = self._calling.end_pass()
        self._service.known = {**self._service.known, **left} if left else self._service.known
        self._items.clear()
        self._tell_now_and_then(at_end=True)

    # --- reading ---

    def _read_all(self) -> None:
        while not self._is_closed:
            with self._calling.changed:
                while not self._is_closed and not self._has_room():
                    self._calling.changed.wait(_LOOK_S)
            if self._is_closed or not self._read_one():
                return

    def _read_some(self) -> None:
        """Read ahead in the script's own thread: while there is room and the next answer is not there, or a little."""
        count = 0
        while not self._is_read and self._error is None and self._has_room():
            is_ready = bool(self._items) and self._calling.outlook().window.lead > 0
            if is_ready and count >= _READ_AT_ONCE:
                return
            if not self._read_one():
                return
            count += 1

    def _has_room(self) -> bool:
        return self._calling.outlook().window.has_room

    def _read_one(self) -> bool:
        """Read one item; whether there may be more."""
        try:
            item = self._reading.next()
        except BaseException as error:  # raised where the script asks for this item, as by any loader
            with self._calling.changed:
                self._error, self._is_read = error, True
                self._calling.changed.notify_all()
            return False
        with self._calling.changed:
            if item is None or self._is_closed:
                self._is_read = True
                self._calling.changed.notify_all()
                return False
            self._add(item)
        return True

    def _add(self, item: _Item) -> None:
        service, rows = self._service, row_types(item.arrays)
        if service.rows not in (None, rows):
            service.known.clear()
        service.rows = rows
        self._calling.expect(rows, max(self._reading.largest, item.place.samples))
        known = service.known.pop(item.place, None)
        size_bytes = held_bytes(item) + item.place.samples * self._calling.answer_row_bytes
        number = self._calling.read(item.place, size_bytes, item.arrays, known)
        self._items.append(_Item(item.value, item.place, item.indices, item.arrays, number))
        # Answers to places before this one will not be asked for in this pass.
        beyond = [place for place in service.known if _is_before(place, item.place)]
        for place in beyond:
            del service.known[place]

    # --- waiting ---

    def _wait_for_item(self) -> _Item | None:
        with self._calling.changed:
            while not self._items and not self._is_read:
                self._calling.changed.wait(_LOOK_S)
            return self._items[0] if self._items else None

    def _wait_for_answer(self, item: _Item) -> tuple[Array, ...]:
        began_s = time.monotonic()
        is_told = False
        while True:
            answer = self._calling.take(item.number)
            if answer is not None:
                self._waited_s += time.monotonic() - began_s
                return answer
            outlook, waited_s = self._calling.outlook(), time.monotonic() - began_s
            problem = self._problem(outlook, item, waited_s)
            if problem is not None:
                self.close()
                self._service.known.clear()
                raise problem
            if not is_told and not outlook.ready and waited_s > _LOOK_S:
                is_told = True
                self._service.tell(events.TeachersShort(round(waited_s, 3), _reasons(outlook)))
            with self._calling.changed:
                if self._calling.outlook().window.lead == 0:
                    self._calling.changed.wait(_LOOK_S)

    def _problem(self, outlook: Outlook, item: _Item, waited_s: float) -> Exception | None:
        """Why it makes no sense to wait on."""
        if outlook.poisoned is not None:
            return self._poison(outlook)
        patience_s = self._service.teachers.patience_s
        is_hopeless = (
            not outlook.ready
            and bool(outlook.faults)
            and all(fault.is_lasting for fault in outlook.faults.values())
            and min(outlook.short_s, waited_s) >= min(_LASTING_S, patience_s)
        )
        if waited_s < patience_s and not is_hopeless:
            return None
        how = "can be used" if is_hopeless else f"has answered for {waited_s:.0f} s"
        where = self._service.teachers.source
        problem = self._service.finding.problem
        if outlook.ready:
            reasons = f"{outlook.ready} are connected, and none of them answers"
        elif outlook.faults:
            reasons = _reasons(outlook)
        else:
            reasons = problem or "the source lists none"
        return NoTeacherError(
            f"no teacher of {where!r} {how}, and the micro-batch at {item.place} waits for one: {reasons}; expected at "
            f"least one: see 'edl-hvd teachers {where}', and start some with 'edl-hvd teach'"
        )

    def _poison(self, outlook: Outlook) -> Exception:
        poisoned = outlook.poisoned
        assert poisoned is not None
        guilty = next((item for item in self._items if item.number == poisoned.number), None)
        what = f"{guilty.place} ({show_indices(guilty.indices)})" if guilty else "a place that is left already"
        return UsageError(
            f"{len(poisoned.reasons)} teachers were lost with, or failed on, the micro-batch at {what}: "
            f"{'; '.join(poisoned.reasons)}; expected an input that the model takes: compute it with the model by "
            "hand, and repair the data set, send=, or the teacher"
        )

    def _tell_now_and_then(self, at_end: bool = False) -> None:
        now_s = time.monotonic()
        if not self._samples or (now_s - self._told_s < _ANSWERS_EVERY_S and not at_end):
            return
        self._told_s = now_s
        window = self._calling.outlook().window
        self._service.tell(
            events.Answers(
                samples=self._samples,
                seconds=round(now_s - self._began_s, 3),
                waited_s=round(self._waited_s, 3),
                teachers=len(window.teachers),
                lead=window.lead,
                window=len(window.entries),
                given=window.given,
                again=window.again,
                hedged=window.hedges,
            )
        )


class _LocalPass:
    """One pass with a model in this process."""

    def __init__(self, reading: _Reading, teacher: Teacher, teachers: Teachers) -> None:
        self._reading, self._teacher, self._teachers = reading, teacher, teachers
        self._is_closed = False

    def next(self) -> Any:
        """See ``_Pass.next``."""
        if self._is_closed:
            raise _ended_early()
        item = self._reading.next()
        if item is None:
            raise StopIteration
        padded_to = max(self._reading.largest, item.place.samples) if self._teachers.exact else 0
        arrays = self._teacher.answer(to_tensors(item.arrays), self._teachers.reduction, padded_to)
        why = check_probe(arrays)
        if why:
            raise UsageError(f"the local teacher fails on {item.place} ({show_indices(item.indices)}): {why}")
        return _join(item.value, self._teachers.reduction.restore(to_tensors(arrays)))

    def close(self) -> None:
        """End the pass."""
        self._is_closed = True


def _ended_early() -> UsageError:
    return UsageError(
        "an iterator of a DistillLoader was used after the loader was closed, or another pass over it had begun; "
        "expected one pass at a time: make a loader for each"
    )


def _join(value: Any, answer: Any) -> Any:
    """A batch with its answer."""
    if isinstance(value, Mapping):
        return {**value, "answer": answer}
    if isinstance(value, (tuple, list)):
        return (*value, answer)
    return value, answer


def _is_before(one: Place, other: Place) -> bool:
    is_same = (one.seed, one.epoch, one.order) == (other.seed, other.epoch, other.order)
    return not is_same or one.position < other.position


def held_bytes(item: _Item) -> int:
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
    note(list(to_tensors(item.arrays).values()))
    return sum(sizes.values())


def _reasons(outlook: Outlook) -> str:
    return "; ".join(f"{address}: {fault.why}" for address, fault in sorted(outlook.faults.items()))
