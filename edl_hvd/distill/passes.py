"""One pass over a loader's micro-batches: read ahead, sent to teachers, and yielded in order with their answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from edl_hvd import events
from edl_hvd.distill import window_events
from edl_hvd.distill.call import Wishes
from edl_hvd.distill.calling import Calling, Outlook
from edl_hvd.distill.finding import Finding
from edl_hvd.distill.outputs import find_nan, row_types, to_tensors
from edl_hvd.distill.place import show_indices
from edl_hvd.distill.reading import Item, Part, Reading, held_bytes
from edl_hvd.distill.teacher import Teacher, check_probe
from edl_hvd.distill.teachers import Teachers
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frames import Array
from edl_hvd.settings import Launch, Settings
from edl_hvd.tensor_threads import TensorThread

_LOOK_S = 0.25
_LASTING_S = 5.0
# When no address can ever become a teacher, nothing is gained by waiting longer; the source may be half written.
_ANSWERS_EVERY_S = 30.0
_END_S = 5.0
# Longest wait for a reading thread, which ends before its next item.
_READ_AT_ONCE = 2


class Service:
    """The connections of one loader to one kind of teachers, from its first pass on.

    Args:
        teachers: Teachers that are wanted.
        changed: Condition that is notified of whatever changes; the loader's services share one.
    """

    def __init__(self, teachers: Teachers, changed: threading.Condition) -> None:
        self.teachers = teachers
        self.log = events.EventLog(Settings.from_environment().events)
        launch = Launch.from_environment()
        wishes = Wishes(
            job=launch.run, student=f"{launch.host}:{launch.local_rank}", outputs=teachers.outputs,
            exact=teachers.exact, fingerprint=teachers.fingerprint,
        )  # fmt: skip
        self.calling = Calling(wishes, teachers.token, teachers.limit_bytes, find_nan, self._tell, changed)
        self.finding = Finding(teachers.source, teachers.port, self.calling.set_addresses, self.calling.blame)

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
        for part in item.parts:
            self._services[part.name].calling.handle(window_events.Asked())
        began_s = time.monotonic()
        answers = [self._wait_for_answer(item, part) for part in item.parts]
        self._waited_s += time.monotonic() - began_s
        with self._changed:
            self._items.popleft()
        self._samples += item.place.samples
        self._tell_now_and_then()
        return _join(item, answers, {name: one.teachers for name, one in self._services.items()})

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
        return all(self._services[part.name].calling.is_answered(part.number) for part in item.parts)

    def _read_one(self) -> bool:
        """Read one item; whether there may be more."""
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

    def _wait_for_answer(self, item: Item, part: Part) -> tuple[Array, ...]:
        service = self._services[part.name]
        began_s = time.monotonic()
        is_told = False
        while True:
            answer = service.calling.take(part.number)
            if answer is not None:
                return answer
            outlook, waited_s = service.calling.outlook(), time.monotonic() - began_s
            problem = self._problem(service, outlook, item, waited_s)
            if problem is not None:
                self.close(is_final=True)
                raise problem
            if not is_told and not outlook.ready and waited_s > _LOOK_S:
                is_told = True
                service.tell(events.TeachersShort(round(waited_s, 3), _reasons(outlook)))
            with self._changed:
                if not service.calling.is_answered(part.number):
                    self._changed.wait(_LOOK_S)

    def _problem(self, service: Service, outlook: Outlook, item: Item, waited_s: float) -> Exception | None:
        """Why it makes no sense to wait on."""
        if outlook.poisoned is not None:
            return self._poison(outlook.poisoned, service)
        patience_s = service.teachers.patience_s
        is_hopeless = (
            not outlook.ready
            and bool(outlook.faults)
            and all(fault.is_lasting for fault in outlook.faults.values())
            and min(outlook.short_s, waited_s) >= min(_LASTING_S, patience_s)
        )
        if waited_s < patience_s and not is_hopeless:
            return None
        how = "can be used" if is_hopeless else f"has answered for {waited_s:.0f} s"
        where = service.teachers.source
        problem = service.finding.problem
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

    def _poison(self, poisoned: window_events.Poisoned, service: Service) -> Exception:
        guilty = next(
            (item for item in self._items for part in item.parts
             if part.number == poisoned.number and self._services[part.name] is service), None,
        )  # fmt: skip
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
        for service in self._services.values():
            self._tell_of(service, now_s)

    def _tell_of(self, service: Service, now_s: float) -> None:
        window = service.calling.outlook().window
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
        return _join(item, [self._answer(item, part) for part in item.parts], self._teachers)

    def _answer(self, item: Item, part: Part) -> tuple[Array, ...]:
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


def _join(item: Item, answers: Sequence[tuple[Array, ...]], teachers: Mapping[str, Teachers]) -> Any:
    """A batch with its answers."""
    value, tensors = item.value, [to_tensors(one) for one in answers]
    if item.parts[0].rows is not None:
        answer = teachers[item.parts[0].name].reduction.restore(_merge(item, tensors))
    else:
        named = {
            part.name: teachers[part.name].reduction.restore(one) for part, one in zip(item.parts, tensors, strict=True)
        }
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


def _reasons(outlook: Outlook) -> str:
    return "; ".join(f"{address}: {fault.why}" for address, fault in sorted(outlook.faults.items()))
