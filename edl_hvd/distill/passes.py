"""One pass over a loader's micro-batches: read ahead, sent to teachers, and yielded in order with their answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from edl_hvd import events
from edl_hvd.distill import window_events
from edl_hvd.distill.outputs import Outputs, row_types, to_tensors
from edl_hvd.distill.place import show_indices
from edl_hvd.distill.reading import Item, PartToSend, Reading, held_bytes
from edl_hvd.distill.service import Service
from edl_hvd.distill.stages import StageTimes
from edl_hvd.distill.teacher import Teacher, check_probe
from edl_hvd.distill.teachers import Teachers
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frames import Array
from edl_hvd.teacher_counts import answer_counts
from edl_hvd.tensor_threads import TensorThread

_LOOK_S = 0.25
_ANSWERS_EVERY_S = 30.0
_END_S = 5.0
# Longest wait for a reading thread, which ends before its next item.
_READ_AT_ONCE = 2


class Pass:
    """One pass with services; ``close`` ends it, and may be called again.

    Args:
        reading: Micro-batches.
        services: Connections by the name of the teachers.
        changed: Condition that they share.
    """

    def __init__(self, reading: Reading, services: Mapping[str, Service], changed: threading.Condition) -> None:
        self._reading, self._services, self._changed = reading, dict(services), changed
        self._items: deque[Item] = deque()
        self._error: BaseException | None = None
        self._is_read = self._is_closed = self._is_through = False
        self._waited_s = 0.0
        self._samples = 0
        self._read_s, self._reads = 0.0, 0
        # Of each service, at the end of the pass.
        self._times: dict[Service, StageTimes] = {}
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
        if self._thread is None:
            self._read_some()
        item = self._wait_for_item()
        if item is None:
            self._is_through = True
            self.close()
            if self._error is not None:
                raise self._error
            raise StopIteration
        answer_counts.begin()
        for part in item.parts:
            self._services[part.name].calling.handle(window_events.Asked())
        began_s = time.monotonic()
        answers = [self._wait_for_answer(item, part) for part in item.parts]
        self._waited_s += time.monotonic() - began_s
        with self._changed:
            self._items.popleft()
        self._samples += item.place.samples
        windows = [service.calling.window for service in self._services.values()]
        answer_counts.end(
            item.place.samples, sum(len(one.teachers) for one in windows), min(one.lead for one in windows),
            max(len(one.entries) for one in windows),
        )  # fmt: skip
        self._tell_now_and_then()
        return _join(item, answers, {name: one.teachers.reduction for name, one in self._services.items()})

    def close(self, is_final: bool = False) -> None:
        """End the pass; the next one takes over what teachers have answered or have, unless this is the last one."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        for service in self._services.values():
            self._times[service] = service.calling.outlook().times
            service.calling.end_pass(is_final)
        self._items.clear()
        self._tell_now_and_then(at_end=True)

    # --- reading ---

    def _read_all(self) -> None:
        while not self._is_closed:
            with self._changed:
                while not self._is_closed and not self._has_room():
                    self._changed.wait(_LOOK_S)
            if self._is_closed or not self._read_one():
                return

    def _read_some(self) -> None:
        """Read ahead in the script's own thread: while there is room and the next answer is not there, or a little."""
        count = 0
        while not self._is_read and self._error is None and self._has_room():
            is_ready = bool(self._items) and self._is_answered(self._items[0])
            if is_ready and count >= _READ_AT_ONCE:
                return
            if not self._read_one():
                return
            count += 1

    def _has_room(self) -> bool:
        return all(service.calling.has_room for service in self._services.values())

    def _is_answered(self, item: Item) -> bool:
        return all(self._services[part.name].calling.answer_to(part.number) is not None for part in item.parts)

    def _read_one(self) -> bool:
        """Read one item; whether there may be more."""
        began_s = time.monotonic()
        try:
            item = self._reading.next()
        except BaseException as error:  # raised where the script asks for this item, as by any loader
            with self._changed:
                self._error, self._is_read = error, True
                self._changed.notify_all()
            return False
        with self._changed:
            if item is None or self._is_closed:
                self._is_read = True
                self._changed.notify_all()
                return False
            self._read_s, self._reads = self._read_s + time.monotonic() - began_s, self._reads + 1
            self._add(item)
        return True

    def _add(self, item: Item) -> None:
        size_bytes = held_bytes(item)
        largest = max(self._reading.largest, item.place.samples)
        parts = []
        for part in item.parts:
            calling = self._services[part.name].calling
            calling.expect(row_types(part.arrays), largest)
            answer_bytes = part.place.samples * calling.answer_row_bytes
            parts.append(replace(part, number=calling.read(part.place, size_bytes + answer_bytes, part.arrays)))
        self._items.append(replace(item, parts=tuple(parts)))

    # --- waiting ---

    def _wait_for_item(self) -> Item | None:
        with self._changed:
            while not self._items and not self._is_read:
                self._changed.wait(_LOOK_S)
            return self._items[0] if self._items else None

    def _wait_for_answer(self, item: Item, part: PartToSend) -> tuple[Array, ...]:
        service = self._services[part.name]
        try:
            return service.wait_for_answer(
                lambda: service.calling.take(part.number), f"the micro-batch at {item.place}",
                lambda number: self._name(service, number),
            )  # fmt: skip
        except (NoTeacherError, UsageError):
            self.close(is_final=True)
            raise

    def _name(self, service: Service, number: int) -> str:
        """The micro-batch of a task, for an error."""
        for item in self._items:
            if any(part.number == number and self._services[part.name] is service for part in item.parts):
                return f"the micro-batch at {item.place} ({show_indices(item.indices)})"
        return "a micro-batch at a place that is left already"

    def _tell_now_and_then(self, at_end: bool = False) -> None:
        now_s = time.monotonic()
        if not self._samples or (now_s - self._told_s < _ANSWERS_EVERY_S and not at_end):
            return
        self._told_s = now_s
        for service in self._services.values():
            self._tell_of(service, now_s)

    def _tell_of(self, service: Service, now_s: float) -> None:
        outlook = service.calling.outlook()
        window, times = outlook.window, self._times.get(service, outlook.times)
        service.tell(
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
                read_s=round(self._read_s / max(1, self._reads), 6),
                **asdict(times),
            )
        )


class LocalPass:
    """One pass with models in this process.

    Args:
        reading: Micro-batches.
        models: Models by the name of the teachers.
        teachers: Teachers that are wanted.
    """

    def __init__(self, reading: Reading, models: Mapping[str, Teacher], teachers: Mapping[str, Teachers]) -> None:
        self._reading, self._models, self._teachers = reading, dict(models), dict(teachers)
        self._is_closed = False

    def next(self) -> Any:
        """See ``Pass.next``."""
        if self._is_closed:
            raise _ended_early()
        item = self._reading.next()
        if item is None:
            raise StopIteration
        reductions = {name: one.reduction for name, one in self._teachers.items()}
        return _join(item, [self._answer(item, part) for part in item.parts], reductions)

    def _answer(self, item: Item, part: PartToSend) -> tuple[Array, ...]:
        wanted = self._teachers[part.name]
        padded_to = max(self._reading.largest, item.place.samples) if wanted.exact else 0
        arrays = self._models[part.name].answer(to_tensors(part.arrays), wanted.reduction, padded_to)
        why = check_probe(arrays)
        if why:
            raise UsageError(f"the local teacher fails on {item.place} ({show_indices(item.indices)}): {why}")
        return arrays

    def close(self) -> None:
        """End the pass."""
        self._is_closed = True


def _ended_early() -> UsageError:
    return UsageError(
        "an iterator of a DistillLoader was used after the loader was closed, or another pass over it had begun; "
        "expected one pass at a time: make a loader for each"
    )


def _join(item: Item, answers: Sequence[tuple[Array, ...]], reductions: Mapping[str, Outputs]) -> Any:
    """A batch with its answers."""
    value, tensors = item.value, [to_tensors(one) for one in answers]
    if item.parts[0].rows is not None:
        answer = reductions[item.parts[0].name].restore(_merge(item, tensors))
    else:
        named = {part.name: reductions[part.name].restore(one) for part, one in zip(item.parts, tensors, strict=True)}
        answer = named.get("", named)
    if isinstance(value, Mapping):
        return {**value, "answer": answer}
    if isinstance(value, (tuple, list)):
        return (*value, answer)
    return value, answer


def _merge(item: Item, tensors: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The answers of several teachers to some samples each, as one to all."""
    kinds = [{name: (one.dtype, one.shape[1:]) for name, one in answer.items()} for answer in tensors]
    if any(kind != kinds[0] for kind in kinds):
        shown = "; ".join(
            f"{part.name!r}: " + ", ".join(f"{name} {dtype} {tuple(shape)}" for name, (dtype, shape) in kind.items())
            for part, kind in zip(item.parts, kinds, strict=True)
        )
        raise UsageError(
            f"the teachers that samples are routed to answer in different types per sample: {shown}; expected the "
            "same: use equal outputs= and vocabularies, or give the answers names with a loader without route="
        )
    merged = {name: one.new_empty((item.place.samples, *one.shape[1:])) for name, one in tensors[0].items()}
    for part, answer in zip(item.parts, tensors, strict=True):
        for name, one in answer.items():
            merged[name][list(part.rows or ())] = one
    return merged
