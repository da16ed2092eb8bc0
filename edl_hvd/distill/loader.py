"""A loader whose items carry a teacher's answer, in the order of the sampler.

Each ``iter()`` is a pass: micro-batches are read ahead, named by their places, sent to teachers, and yielded in order
with their answers. Nothing is journalled, since the position moves only when ``State`` has counted a step: a new pass
begins there, and what was read ahead is dropped. Answers that the last pass had left are used again by their places.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edl_hvd.distill.indices import Indices
from edl_hvd.distill.kept import KeptAnswers
from edl_hvd.distill.outputs import describe
from edl_hvd.distill.passes import LocalPass, Pass
from edl_hvd.distill.reading import Reading, Sending, describe_sampler, tells_indices
from edl_hvd.distill.service import Service
from edl_hvd.distill.teacher import Teacher
from edl_hvd.distill.teachers import Teachers
from edl_hvd.errors import UsageError
from edl_hvd.teacher_counts import answer_counts


class DistillLoader:
    """Loader that yields each batch of another loader together with the teachers' answer; original here.

    A batch ``(images, target)`` becomes ``(images, target, answer)``; a dict gets the key "answer"; anything else
    becomes ``(batch, answer)``. It goes where the other loader would: ``state.batches(loader)``,
    ``state.steps(loader)``, or a plain loop. Every rank makes one, outside of the loop over epochs; it is not
    collective. Iterating blocks while no answer is there.

    Args:
        loader: ``DataLoader`` with a ``batch_sampler``, or another loader that yields batches in the sampler's order.
            With ``shuffle=True`` or an iterable data set it works, too, in one process: samples and random numbers are
            those of the loader alone; the indices are not known, so errors do not name them, and nothing is kept.
        teachers: Teachers that answer; or several kinds of them by name, each of which answers every batch: then
            ``answer`` is a dict by name.
        send: Function of a batch that returns what a teacher sees of it: a tensor, or a dict of tensors, whose first
            dimension is the batch. Or :class:`~edl_hvd.distill.Indices`, where teachers read the samples themselves.
        route: Function of a batch that returns, for each sample, the name of the teachers that get it: a sequence, or a
            tensor of numbers whose texts are the names. Then ``answer`` is that of one teacher for each sample.
        keep: Folder or URL at which answers are kept, and looked for before a teacher is asked. Workers, restarts and
            other jobs may share it.
        views: Number of epochs after which the inputs come again, for ``keep``: 1 where no augmentation changes them.
            Left out, it is that of ``SeededDataset(views=…)``; without one, each epoch has inputs of its own.

    Raises:
        UsageError: The loader has no batch sampler, or yields batches in another order than it; or ``keep`` or
            ``views`` is out of range.
    """

    def __init__(
        self,
        loader: Any,
        teachers: Teachers | Mapping[str, Teachers],
        *,
        send: Callable[[Any], Any] | Indices,
        route: Callable[[Any], Any] | None = None,
        keep: str | os.PathLike[str] | None = None,
        views: int | None = None,
    ) -> None:
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
        if isinstance(send, Indices) and route is not None:
            raise UsageError("route= sends each teacher a part of the batch, and send=Indices() its place; choose one")
        self._teachers = {"": teachers} if isinstance(teachers, Teachers) else dict(teachers)
        _check_teachers(self._teachers, route is not None)
        self.loader, self.teachers, self.send, self.route = loader, teachers, send, route
        self.batch_sampler = loader.batch_sampler
        self.dataset = getattr(loader, "dataset", None)
        self._passes = 0
        self._open = _Open()
        if views is not None and keep is None:
            raise UsageError(
                f"views={views!r} says when kept answers are used again, and none are kept; give keep=…, too"
            )
        if keep is not None and not tells_indices(self.batch_sampler):
            raise UsageError(
                f"keep={os.fspath(keep)!r}: answers are kept by the indices of samples, which a "
                f"{describe_sampler(self.batch_sampler)} draws anew whenever it is iterated; expected an "
                "ElasticBatchSampler, or a list of batches"
            )
        if keep is not None:
            views = getattr(self.dataset, "views", None) if views is None else views
            self._open.kept = KeptAnswers(os.fspath(keep), views, self.batch_sampler)
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
        if is_open.kept is not None:
            is_open.kept.begin_pass()
        self._passes += 1
        sending = Sending(self.send, tuple(self._teachers), self.route)
        reading = Reading(self.loader, self.batch_sampler, sending, self._passes - 1)
        for name, wanted in self._teachers.items():
            if wanted.source and name not in is_open.services:
                is_open.services[name] = Service(wanted, is_open.changed)
            elif not wanted.source and name not in is_open.models:
                is_open.models[name] = wanted.local_model()
        for name, service in is_open.services.items():
            service.calling.require(self._teachers[name].wanted())
        if is_open.services:
            is_open.current = Pass(reading, is_open.services, is_open.changed, is_open.kept)
        else:
            is_open.current = LocalPass(reading, is_open.models, self._teachers, is_open.kept)
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

    def __del__(self) -> None:
        self._pass.leave()


@dataclass
class _Open:
    """What a loader has open; it does not know the loader."""

    current: Pass | LocalPass | None = None
    services: dict[str, Service] = field(default_factory=dict)
    models: dict[str, Teacher] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    kept: KeptAnswers | None = None

    @property
    def service(self) -> Service | None:
        """The service of a loader with one kind of teachers; ``None`` before its first pass."""
        return self.services.get("")

    def end_pass(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None

    def close(self) -> None:
        self.end_pass()
        if self.services:
            answer_counts.forget()
        for service in self.services.values():
            service.close()
        self.services.clear()
        if self.kept is not None:
            self.kept.close()


def _check_teachers(teachers: Mapping[str, Teachers], is_routed: bool) -> None:
    """Check what was given as teachers."""
    kinds = {type(one).__name__ for one in teachers.values() if not isinstance(one, Teachers)}
    if not teachers or kinds:
        raise UsageError(
            f"teachers are {', '.join(sorted(kinds)) or 'an empty dict'}; expected Teachers(…), or a dict of them by "
            "name"
        )
    if is_routed and "" in teachers:
        raise UsageError("route= chooses among several teachers; expected a dict of Teachers by name")
    if len({bool(one.source) for one in teachers.values()}) > 1:
        with_source = [name for name, one in teachers.items() if one.source]
        raise UsageError(
            f"the teachers {', '.join(with_source)} have a source, and the others have none; expected a source for "
            "all, or local= for all"
        )
