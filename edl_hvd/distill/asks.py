"""Answers to inputs that are no part of a data set, such as sequences that the student has just made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from edl_hvd.distill import window_events
from edl_hvd.distill.outputs import named, row_types, to_arrays, to_tensors
from edl_hvd.distill.place import Place
from edl_hvd.distill.service import Service, WantedTeachers
from edl_hvd.distill.teacher import Teacher, check_probe
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frames import Array, ArrayType

_LOOK_S = 0.25


class PendingAnswer:
    """The answer to an input that teachers were asked for. One that is not needed any more is just forgotten."""

    def __init__(self, asks: Asks | None, number: int, answer: Any = None) -> None:
        self._asks, self._number, self._answer = asks, number, answer
        self.arrays: tuple[Array, ...] | None = None
        self.problem: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` does not block. Not collective."""
        return self._asks is None or self.problem is not None or self._asks.answer_to(self._number, self) is not None

    def result(self) -> Any:
        """The answer, as a loader yields it. Blocks until it is there; not collective.

        Raises:
            NoTeacherError: There was none for as long as ``patience``.
            UsageError: Several teachers have failed on one input.
        """
        if self._asks is not None:
            self._answer = self._asks.wait(self._number, self)
            self._asks = None
        return self._answer


class Asks:
    """The connections of ``Teachers.ask``, from its first use on. One thread.

    Args:
        teachers: Teachers that are wanted.
    """

    def __init__(self, teachers: WantedTeachers) -> None:
        self._teachers = teachers
        self._service = Service(teachers, threading.Condition())
        self._calling = self._service.calling
        self._reduction = teachers.reduction
        self._pending: weakref.WeakValueDictionary[int, PendingAnswer] = weakref.WeakValueDictionary()
        self._asked = self._largest = 0
        self._rows: tuple[ArrayType, ...] = ()

    def ask(self, send: Any) -> PendingAnswer:
        """Send an input. Blocks while the window is full."""
        arrays = _arrays_of(send)
        self._calling.require(self._teachers.wanted())
        samples = arrays[0].type.shape[0]
        self._largest = max(self._largest, samples)
        rows = row_types(arrays)
        oldest = self._calling.window.head
        while rows != self._rows and oldest is not None:  # another type begins the conversations anew
            self._guarded(oldest, None)
            oldest = self._calling.window.head
        self._rows = rows
        self._calling.expect(rows, self._largest)
        while not self._calling.has_room and oldest is not None:
            self._guarded(oldest, None)
            oldest = self._calling.window.head
        size_bytes = sum(one.type.size_bytes for one in arrays) + samples * self._calling.answer_row_bytes
        place = Place(0, 0, self._asked, samples, "asked")
        self._asked += samples
        with self._calling.changed:
            number = self._calling.read(place, size_bytes, arrays)
            pending = self._pending[number] = PendingAnswer(self, number)
        return pending

    def answer_to(self, number: int, pending: PendingAnswer | None) -> tuple[Array, ...] | None:
        """The answer to an input; ``None`` if it is not there."""
        with self._calling.changed:
            self._consume()
            if pending is not None and pending.arrays is not None:
                return pending.arrays
            return self._calling.answer_to(number)

    def wait(self, number: int, pending: PendingAnswer) -> Any:
        """See ``PendingAnswer.result``."""
        if pending.problem is not None:
            raise pending.problem
        return self._reduction.restore(to_tensors(self._guarded(number, pending)))

    def close(self) -> None:
        """End the connections."""
        self._service.close()

    def _guarded(self, number: int, pending: PendingAnswer | None) -> tuple[Array, ...]:
        """Wait for an answer; what ends it ends all that are pending, because no place is given a second time."""
        self._calling.handle(window_events.Asked())

        def look() -> tuple[Array, ...] | None:
            found = self.answer_to(number, pending)
            # An answer that nobody has kept was consumed.
            return () if found is None and number not in self._calling.window.entries else found

        try:
            return self._service.wait_for_answer(look, "an input that was asked for", self._name)
        except (NoTeacherError, UsageError) as error:
            self._calling.end_pass(is_final=True)
            for other in list(self._pending.values()):
                other.problem = other.problem or error
            raise

    def _consume(self) -> None:
        """Take all answers from the head of the window on; under the lock."""
        while (head := self._calling.window.head) is not None:
            answer = self._calling.take(head, is_final=True)
            if answer is None:
                return
            pending = self._pending.get(head)
            if pending is not None:
                pending.arrays = answer

    def _name(self, number: int) -> str:
        entry = self._calling.window.entries.get(number)
        return f"an input of {entry.place.samples} samples that was asked for" if entry else "an input"


def ask_model(model: Teacher, wanted: WantedTeachers, send: Any) -> PendingAnswer:
    """The answer of a model in this process."""
    arrays = model.answer(to_tensors(_arrays_of(send)), wanted.reduction)
    why = check_probe(arrays)
    if why:
        raise UsageError(f"the local teacher fails on an input that was asked for: {why}")
    return PendingAnswer(None, 0, wanted.reduction.restore(to_tensors(arrays)))


def _arrays_of(send: torch.Tensor | Mapping[str, torch.Tensor]) -> tuple[Array, ...]:
    try:
        arrays = to_arrays({name: one.detach().clone() for name, one in named(send).items()})
    except UsageError as error:
        raise UsageError(
            f"ask was given what cannot travel: {error}; expected a tensor, or a dict of tensors"
        ) from error
    lengths = {str(one.type): one.type.shape[:1] for one in arrays}
    if len(set(lengths.values())) != 1 or not all(length and length[0] for length in lengths.values()):
        raise UsageError(
            f"ask was given {', '.join(lengths)}; expected the same number of samples, at least 1, in each"
        )
    return arrays
