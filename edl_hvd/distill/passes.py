"""One pass over a loader's micro-batches: read ahead, sent to teachers, and yielded in order with their answers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from edl_hvd import events
from edl_hvd.distill import window_events
from edl_hvd.distill.heap import Heap
from edl_hvd.distill.kept import AnswerKind, KeptAnswers, KeptPart, check_rows
from edl_hvd.distill.outputs import Outputs, row_types, to_tensors
from edl_hvd.distill.place import show_indices
from edl_hvd.distill.reading import Item, PartToSend, Reading, held_bytes
from edl_hvd.distill.service import Service
from edl_hvd.distill.teacher import Teacher, check_probe, digest_answer
from edl_hvd.distill.teachers import Teachers
from edl_hvd.distill.window import Window
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frames import Array
from edl_hvd.stage_times import StageTimes, mean_stages
from edl_hvd.teacher_counts import answer_counts
from edl_hvd.tensor_threads import TensorThread

_LOOK_S = 0.25
_ANSWERS_EVERY_S = 30.0
_STAGES_EVERY_S = 0.5
_END_S = 5.0
# Longest wait for a reading thread, which stops before its next item.
_READ_AT_ONCE = 2
_ANSWER = "answer"


@dataclass
class _Mean:
    """The mean of some times."""

    sum_s: float = 0.0
    count: int = 0

    def add(self, since_s: float) -> None:
        """One more, which has begun then and ends now."""
        self.sum_s, self.count = self.sum_s + time.monotonic() - since_s, self.count + 1

    @property
    def mean_s(self) -> float:
        return round(self.sum_s / max(1, self.count), 6)


@dataclass
class _Leads:
    """Lead and window of a service, summed over the answers that were taken since they were told."""

    leads: int = 0
    windows: int = 0
    count: int = 0

    def note(self, window: Window) -> None:
        self.leads, self.windows, self.count = (
            self.leads + window.lead, self.windows + len(window.entries), self.count + 1
        )  # fmt: skip

    def means(self) -> tuple[float, float]:
        count = max(1, self.count)
        return round(self.leads / count, 2), round(self.windows / count, 2)


class Pass:
    """One pass with services; ``close`` ends it, and may be called again.

    Args:
        reading: Micro-batches.
        services: Connections by the name of the teachers.
        changed: Condition that they share.
        kept: Answers on a storage; ``None`` for none.
    """

    def __init__(
        self, reading: Reading, services: Mapping[str, Service], changed: threading.Condition,
        kept: KeptAnswers | None = None,
    ) -> None:  # fmt: skip
        self._reading, self._services, self._changed, self._kept = reading, dict(services), changed, kept
        self._items: deque[Item] = deque()
        self._error: BaseException | None = None
        self._is_read = self._is_closed = self._is_through = self._is_left = False
        self._has_stopped = threading.Event()
        self._waited_s = 0.0
        self._samples = self._known = 0
        self._heap = Heap(min(service.teachers.limit_bytes for service in services.values()))
        self._reads, self._decodes = _Mean(), _Mean()
        self._leads = {service: _Leads() for service in self._services.values()}
        # Of each service, at the end of the pass.
        self._times: dict[Service, StageTimes | None] = {}
        self._began_s = self._told_s = time.monotonic()
        self._stages: StageTimes | None = None
        self._stages_s = -math.inf
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
            self._read_until_answered()
        elif self._kept is not None:
            self._wait_for_teachers()
        item = self._wait_for_item()
        if item is None:
            self._is_through = True
            self.close()
            if self._error is not None:
                raise self._error
            raise StopIteration
        answer_counts.begin()
        for part in item.parts:
            calling = self._services[part.name].calling
            if calling.answer_to(part.number) is None:
                calling.handle(window_events.Asked())
        began_s = time.monotonic()
        answers = [self._wait_for_answer(item, part) for part in item.parts]
        self._waited_s += time.monotonic() - began_s
        with self._changed:
            self._items.popleft()
        self._samples += item.place.samples
        for part, answer in zip(item.parts, answers, strict=True):
            _note(self._kept, item, part, answer)
            self._known += part.place.samples if part.kept is not None and part.kept.arrays is not None else 0
        windows = [service.calling.window for service in self._services.values()]
        for service, window in zip(self._services.values(), windows, strict=True):
            self._leads[service].note(window)
        answer_counts.end(
            item.place.samples, sum(len(one.teachers) for one in windows), min(one.lead for one in windows),
            max(len(one.entries) for one in windows), self._stage_times(),
        )  # fmt: skip
        self._tell_now_and_then()
        began_s = time.monotonic()
        joined = _join(item, answers, {name: one.teachers.reduction for name, one in self._services.items()})
        self._decodes.add(began_s)
        if self._thread is None:
            self._read_ahead()
        return joined

    def close(self, is_final: bool = False) -> None:
        """End the pass; the next one takes over what teachers have answered or have, unless this is the last one."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._has_stopped.wait(_END_S)
        for service in self._services.values():
            self._times[service] = service.calling.outlook().times
            service.calling.end_pass(is_final)
        self._items.clear()
        self._tell_now_and_then(at_end=True)

    def leave(self) -> None:
        """Nobody takes the next batch any more: end the loader's processes, in the reading thread. Never blocks."""
        self._is_left = True
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    # --- reading ---

    def _read_all(self) -> None:
        try:
            while not self._is_closed and not self._is_left:
                with self._changed:
                    while not self._is_closed and not self._is_left and not self._has_room():
                        self._changed.wait(_LOOK_S)
                if self._is_closed or self._is_left or not self._read_one():
                    return
        finally:
            self._has_stopped.set()
            self._reading.end()

    def _read_until_answered(self) -> None:
        """Read in the script's own thread, while there is room and the next answer is not there."""
        while not (self._items and self._is_answered(self._items[0])) and self._may_read() and self._read_one():
            pass

    def _read_ahead(self) -> None:
        """Read a little in the script's own thread. Teachers are told of it while the script trains.

        The micro-batch that the script is about to get takes its memory as well.
        """
        for _ in range(_READ_AT_ONCE):
            if not self._may_read(beside=1) or not self._read_one():
                return

    def _may_read(self, beside: int = 0) -> bool:
        return not self._is_read and self._error is None and self._has_room(beside)

    def _has_room(self, beside: int = 0) -> bool:
        return all(service.calling.has_room_beside(beside) for service in self._services.values())

    def _is_answered(self, item: Item) -> bool:
        return all(self._services[part.name].calling.answer_to(part.number) is not None for part in item.parts)

    def _read_one(self) -> bool:
        """Read one item; whether there may be more."""
        began_s = time.monotonic()
        try:
            item = self._reading.next()
            if item is not None and self._kept is not None:
                item = self._look_up(item, self._kept)
            if item is not None:
                item = _with_checks(item)
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
            self._reads.add(began_s)
            self._add(item)
        return True

    def _add(self, item: Item) -> None:
        size_bytes = held_bytes(item)
        self._heap.note(size_bytes)
        parts = []
        for part in item.parts:
            calling = self._services[part.name].calling
            self._expect(item, part)
            whole_bytes = size_bytes + part.place.samples * calling.answer_row_bytes
            known = part.kept.arrays if part.kept is not None else None
            parts.append(replace(part, number=calling.read(part.place, whole_bytes, part.arrays, known, part.checks)))
        self._items.append(replace(item, parts=tuple(parts)))

    def _expect(self, item: Item, part: PartToSend) -> None:
        largest = max(self._reading.largest, item.place.samples)
        self._services[part.name].calling.expect(row_types(part.arrays), largest)

    # --- kept answers ---

    def _look_up(self, item: Item, kept: KeptAnswers) -> Item:
        """The item, with what is kept of its answers. Blocks until it is known whose answers they would be."""
        parts = []
        for part in item.parts:
            service = self._services[part.name]
            self._expect(item, part)
            if self._thread is None:
                self._wait_for_teacher(service)
            with self._changed:
                while _kind_of(service) is None and not self._is_closed:
                    self._changed.wait(_LOOK_S)
                kind = _kind_of(service)
            if kind is not None:  # else the pass is over
                part = replace(part, kept=_find(kept, kind, item, part, self._reading))
            parts.append(part)
        return replace(item, parts=tuple(parts))

    def _wait_for_teachers(self) -> None:
        """Wait until each kind of teachers that are asked is known; in the thread of the script."""
        for service in self._services.values():
            if service.calling.is_expecting:
                self._wait_for_teacher(service)

    def _wait_for_teacher(self, service: Service) -> None:
        if _kind_of(service) is not None:
            return
        try:
            service.wait_for_answer(
                lambda: None if _kind_of(service) is None else (), "the search for kept answers",
                lambda number: self._name(service, number),
            )  # fmt: skip
        except (NoTeacherError, UsageError):
            self.close(is_final=True)
            raise

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
        mean_lead, mean_window = self._leads[service].means()
        self._leads[service] = _Leads()
        service.tell(
            events.Answers(
                worker=service.worker,
                samples=self._samples,
                seconds=round(now_s - self._began_s, 3),
                waited_s=round(self._waited_s, 3),
                teachers=len(window.teachers),
                lead=window.lead,
                window=len(window.entries),
                mean_lead=mean_lead,
                mean_window=mean_window,
                given=window.given,
                again=window.again,
                hedged=window.hedges,
                kept=self._known,
                **asdict(self._with_own(times or StageTimes())),
            )
        )

    def _stage_times(self) -> StageTimes | None:
        """Where the time of a micro-batch goes; not computed for each one, as a heartbeat reads it once in a while."""
        now_s = time.monotonic()
        if now_s - self._stages_s >= _STAGES_EVERY_S:
            every = [times for one in self._services.values() if (times := one.calling.times) is not None]
            self._stages = mean_stages([self._with_own(times) for times in every])
            self._stages_s = now_s if self._decodes.count else -math.inf  # not all are known at the first one
        return self._stages

    def _with_own(self, times: StageTimes) -> StageTimes:
        """The stages of a service, with those of the pass itself."""
        return replace(times, read_s=self._reads.mean_s, decode_s=self._decodes.mean_s)


class LocalPass:
    """One pass with models in this process.

    Args:
        reading: Micro-batches.
        models: Models by the name of the teachers.
        teachers: Teachers that are wanted.
        kept: Answers on a storage; ``None`` for none.
    """

    def __init__(
        self, reading: Reading, models: Mapping[str, Teacher], teachers: Mapping[str, Teachers],
        kept: KeptAnswers | None = None,
    ) -> None:  # fmt: skip
        self._reading, self._models, self._teachers, self._kept = reading, dict(models), dict(teachers), kept
        self._kinds: dict[str, AnswerKind] = {}
        self._probes: dict[str, str] = {}
        self._is_closed = False

    def next(self) -> Any:
        """See ``Pass.next``."""
        if self._is_closed:
            raise _ended_early()
        item = self._reading.next()
        if item is None:
            raise StopIteration
        reductions = {name: one.reduction for name, one in self._teachers.items()}
        if self._kept is not None:
            parts = [
                replace(one, kept=_find(self._kept, self._kind_of(one), item, one, self._reading)) for one in item.parts
            ]
            item = replace(item, parts=tuple(parts))
        answers = [self._answer(item, part) for part in item.parts]
        for part, answer in zip(item.parts, answers, strict=True):
            _note(self._kept, item, part, answer)
        return _join(item, answers, reductions)

    def _kind_of(self, part: PartToSend) -> AnswerKind:
        wanted, model = self._teachers[part.name], self._models[part.name]
        if part.name not in self._kinds:
            probe = self._probe(part) if wanted.exact else ""
            self._kinds[part.name] = _checked_kind(model.fingerprint, wanted.outputs, probe)
        return self._kinds[part.name]

    def _probe(self, part: PartToSend) -> str:
        """Check the model as a service would, once in a pass; the digest of its answer."""
        if part.name not in self._probes:
            wanted, model = self._teachers[part.name], self._models[part.name]
            rows, samples = row_types(part.arrays), self._reading.largest
            self._probes[part.name] = digest_answer(model.probe(rows, samples, wanted.reduction, wanted.exact))
        return self._probes[part.name]

    def _answer(self, item: Item, part: PartToSend) -> tuple[Array, ...]:
        if part.kept is not None and part.kept.arrays is not None:
            return part.kept.arrays
        wanted = self._teachers[part.name]
        self._probe(part)
        padded_to = max(self._reading.largest, item.place.samples) if wanted.exact else 0
        # Copies, as a teacher elsewhere would have them: a model may change its input where that lies.
        inputs = {name: one.clone() for name, one in to_tensors(part.arrays).items()}
        arrays = self._models[part.name].answer(inputs, wanted.reduction, padded_to)
        why = check_probe(arrays)
        if why:
            raise UsageError(f"the local teacher fails on {item.place} ({show_indices(item.indices)}): {why}")
        return arrays

    def leave(self) -> None:
        """Nobody takes the next batch any more. Nothing is read ahead here."""

    def close(self) -> None:
        """End the pass."""
        self._is_closed = True


def _kind_of(service: Service) -> AnswerKind | None:
    """The kind of a service's answers; ``None`` before its first teacher, unless the script has named it."""
    wanted, teaching = service.teachers, service.calling.teaching
    if teaching is not None:
        return _checked_kind(teaching.fingerprint, wanted.outputs, teaching.probe)
    if wanted.fingerprint and not wanted.exact:
        return _checked_kind(wanted.fingerprint, wanted.outputs, "")
    return None


def _checked_kind(fingerprint: str, outputs: str, probe: str) -> AnswerKind:
    if not fingerprint:
        raise UsageError(
            "answers cannot be kept, because the teacher's model is a callable that does not tell which model it is; "
            "give it an attribute `fingerprint`, a text that changes whenever its answers do, or leave keep= out"
        )
    return AnswerKind(fingerprint, outputs, probe)


def _with_checks(item: Item) -> Item:
    """The item with checks of its inputs, which the script may overwrite as soon as it has them."""
    parts: list[PartToSend] = []
    for part in item.parts:
        if part.kept is not None:
            checks = part.kept.keys.checks
        elif parts and parts[0].arrays is part.arrays:
            checks = parts[0].checks
        else:
            checks = check_rows(part.arrays)
        parts.append(replace(part, checks=checks))
    return replace(item, parts=tuple(parts))


def _find(kept: KeptAnswers, kind: AnswerKind, item: Item, part: PartToSend, reading: Reading) -> KeptPart:
    keys = kept.keys_of(item.place, part.indices_in(item.indices), reading.sending.keyed(part.arrays))
    return KeptPart(kind, keys, kept.find(kind, item.place, keys))


def _note(kept: KeptAnswers | None, item: Item, part: PartToSend, answer: tuple[Array, ...]) -> None:
    """The script gets the answer."""
    if kept is not None and part.kept is not None and part.kept.arrays is None:
        kept.note(part.kept, item.place, answer)
        kept.settle()


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
        if _ANSWER in value:
            raise UsageError(
                f"the batch at {item.place} has a field {_ANSWER!r} of its own, and the teachers' answer gets that "
                "name; rename it in collate_fn or in the data set"
            )
        return {**value, _ANSWER: answer}
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
