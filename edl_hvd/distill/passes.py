"""One pass over a loader's micro-batches: read ahead, sent to teachers, and yielded in order with their answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from edl_hvd import events
from edl_hvd.distill import window_events
from edl_hvd.distill.call import Wishes
from edl_hvd.distill.calling import Calling, Outlook
from edl_hvd.distill.finding import Finding
from edl_hvd.distill.outputs import find_nan, row_types, to_tensors
from edl_hvd.distill.place import show_indices
from edl_hvd.distill.reading import Item, Reading, held_bytes
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
    """One pass with a service; ``close`` ends it, and may be called again."""

    def __init__(self, reading: Reading, service: Service) -> None:
        self._reading, self._service, self._calling = reading, service, service.calling
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
        self._calling.handle(window_events.Asked())
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

    def close(self, is_final: bool = False) -> None:
        """End the pass; the next one takes over what teachers have answered or have, unless this is the last one."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._calling.changed:
            self._calling.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        self._calling.end_pass(is_final)
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

    def _add(self, item: Item) -> None:
        self._calling.expect(row_types(item.arrays), max(self._reading.largest, item.place.samples))
        size_bytes = held_bytes(item) + item.place.samples * self._calling.answer_row_bytes
        number = self._calling.read(item.place, size_bytes, item.arrays)
        self._items.append(Item(item.value, item.place, item.indices, item.arrays, number))

    # --- waiting ---

    def _wait_for_item(self) -> Item | None:
        with self._calling.changed:
            while not self._items and not self._is_read:
                self._calling.changed.wait(_LOOK_S)
            return self._items[0] if self._items else None

    def _wait_for_answer(self, item: Item) -> tuple[Array, ...]:
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
                self.close(is_final=True)
                raise problem
            if not is_told and not outlook.ready and waited_s > _LOOK_S:
                is_told = True
                self._service.tell(events.TeachersShort(round(waited_s, 3), _reasons(outlook)))
            with self._calling.changed:
                if self._calling.outlook().window.lead == 0:
                    self._calling.changed.wait(_LOOK_S)

    def _problem(self, outlook: Outlook, item: Item, waited_s: float) -> Exception | None:
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


class LocalPass:
    """One pass with a model in this process."""

    def __init__(self, reading: Reading, teacher: Teacher, teachers: Teachers) -> None:
        self._reading, self._teacher, self._teachers = reading, teacher, teachers
        self._is_closed = False

    def next(self) -> Any:
        """See ``Pass.next``."""
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


def _reasons(outlook: Outlook) -> str:
    return "; ".join(f"{address}: {fault.why}" for address, fault in sorted(outlook.faults.items()))
