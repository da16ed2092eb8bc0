"""A loader whose items carry a teacher's answer, in the order of the sampler.

Each ``iter()`` is a pass: micro-batches are read ahead, named by their places, sent to teachers, and yielded in order
with their answers. Nothing is journalled, since the position moves only when ``State`` has counted a step: a new pass
begins there, and what was read ahead is dropped. Answers that the last pass had left are used again by their places.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edl_hvd.distill.outputs import describe
from edl_hvd.distill.passes import LocalPass, Pass, Service
from edl_hvd.distill.reading import Reading
from edl_hvd.distill.teacher import Teacher
from edl_hvd.distill.teachers import Teachers
from edl_hvd.errors import UsageError


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
        reading = Reading(self.loader, self.batch_sampler, self.send, self._passes - 1)
        if self.teachers.source:
            if is_open.service is None:
                is_open.service = Service(self.teachers)
            is_open.current = Pass(reading, is_open.service)
        else:
            if is_open.local is None:
                assert self.teachers.local is not None
                is_open.local = Teacher.of(self.teachers.local())
            is_open.current = LocalPass(reading, is_open.local, self.teachers)
        return _Iterator(self, is_open.current)

    def close(self) -> None:
        """End the pass and all connections; a loader that is not used any more does so by itself. Not collective."""
        self._open.close()


class _Iterator:
    """What a script iterates over. It keeps the loader, which a pass does not know, for as long as it is used."""

    def __init__(self, loader: DistillLoader, current: Pass | LocalPass) -> None:
        self._loader, self._pass = loader, current

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._pass.next()


@dataclass
class _Open:
    """What a loader has open; it does not know the loader."""

    current: Pass | LocalPass | None = None
    service: Service | None = None
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
