"""The teachers that a loader, or the asking for single inputs, is connected to; and waiting for their answers."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from edl_hvd import events
from edl_hvd.distill.call import Wishes
from edl_hvd.distill.calling import Calling
from edl_hvd.distill.finding import Finding
from edl_hvd.distill.holding import Holding, Outlook, Terms
from edl_hvd.distill.outputs import LOGITS, Outputs, find_nan, to_arrays, to_tensors
from edl_hvd.distill.requesting import Requesting
from edl_hvd.errors import NoTeacherError, UsageError, WorldBrokenError
from edl_hvd.frames import Array
from edl_hvd.open_inference import is_inference_source, read_models
from edl_hvd.settings import Launch, Settings
from edl_hvd.world_change import world_change

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LASTING_S = 5.0
# When no address can ever become a teacher, nothing is gained by waiting longer; the source may be half written.
_LEAVES_S, _LEAVES_SLOW_S = 2.0, 10.0
# A world that is to change is left at a commit, unless the answer that is needed to come there takes longer than this:
# without any teacher, and with some.


class WantedTeachers(Protocol):
    """What a service has to know of :class:`~edl_hvd.distill.Teachers`; see there."""

    source: str
    port: int
    outputs: str
    reduction: Outputs
    patience_s: float
    limit_bytes: int
    exact: bool
    fingerprint: str
    context: ssl.SSLContext | None

    def met(self, fingerprint: str) -> None:
        """Take note of the fingerprint of the teachers whose answers are used."""

    def wanted(self) -> str:
        """The fingerprint that a teacher must have from now on."""

    @property
    def token(self) -> Callable[[], str]:
        """What gives the token."""


class Service:
    """Connections to one kind of teachers, which ``close`` ends.

    Args:
        teachers: Teachers that are wanted.
        changed: Condition that is notified of whatever changes; the services of one loader share it.
    """

    def __init__(self, teachers: WantedTeachers, changed: threading.Condition) -> None:
        self.teachers = teachers
        self.log = events.EventLog(Settings.from_environment().events)
        launch = Launch.from_environment()
        self.worker = f"{launch.host}:{launch.local_rank}"
        wishes = Wishes(
            job=launch.run, student=self.worker, outputs=teachers.outputs,
            exact=teachers.exact, fingerprint=teachers.wanted(),
        )  # fmt: skip
        terms = Terms(
            wishes, teachers.limit_bytes, teachers.context, check=find_nan, tell=self.tell, met=teachers.met,
            changed=changed,
        )  # fmt: skip
        self.finding: Finding | None = None
        self.calling: Holding
        if is_inference_source(teachers.source):
            self.calling = Requesting(terms, read_models(teachers.source), self._convert)
        else:
            self.calling = calling = Calling(terms, teachers.token)
            self.finding = Finding(teachers.source, teachers.port, calling.set_addresses, calling.blame)

    def _convert(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """What a teacher of this package would have sent of a model's outputs."""
        tensors = to_tensors(outputs)
        named = {LOGITS: next(iter(tensors.values()))} if len(tensors) == 1 else tensors
        return to_arrays(self.teachers.reduction.reduce(named))

    def tell(self, event: events.Event) -> None:
        """Write an event; print a warning of a teacher that is not used."""
        if isinstance(event, events.TeacherRefused):
            logger.warning("the teacher at %s is not used: %s", event.teacher, event.reason)
        self.log.emit(event)

    def close(self) -> None:
        """End the threads and the connections."""
        if self.finding is not None:
            self.finding.close()
        self.calling.close()
        self.log.close()

    # --- waiting ---

    def wait_for_answer(
        self, look: Callable[[], tuple[Array, ...] | None], what: str, name: Callable[[int], str]
    ) -> tuple[Array, ...]:
        """The answer to a task. Blocks until it is there.

        ``worker/progress.py`` knows this function by its name: a worker that is in it waits for teachers.

        Args:
            look: Function that returns the answer, or ``None``.
            what: What waits for it, for an error.
            name: Function that names the input of a task, for an error.

        Raises:
            NoTeacherError: There was none for as long as ``patience``.
            UsageError: Several teachers have failed on one input.
            WorldBrokenError: The world is to change, and no commit is to be expected soon.
        """
        changed, began_s = self.calling.changed, time.monotonic()
        is_told = False
        while True:
            with changed:
                answer = look()
                if answer is not None:
                    return answer
            outlook, waited_s = self.calling.outlook(), time.monotonic() - began_s
            self._check(outlook, waited_s, what, name)
            if waited_s > (_LEAVES_SLOW_S if outlook.ready else _LEAVES_S) and world_change.is_pending():
                raise WorldBrokenError(f"it is to change, and {what} has waited for a teacher for {waited_s:.0f} s")
            if not is_told and not outlook.ready and waited_s > _LOOK_S:
                is_told = True
                self.tell(events.TeachersShort(round(waited_s, 3), _reasons(outlook)))
            with changed:
                if self.calling.window is outlook.window:  # else something has happened meanwhile
                    changed.wait(_LOOK_S)

    def _check(self, outlook: Outlook, waited_s: float, what: str, name: Callable[[int], str]) -> None:
        """Raise where it makes no sense to wait on."""
        poisoned = outlook.poisoned
        if poisoned is not None:
            raise UsageError(
                f"{len(poisoned.reasons)} times a teacher was lost with, or failed on, {name(poisoned.number)}: "
                f"{'; '.join(poisoned.reasons)}; expected an input that the model takes: compute it with the model by "
                "hand, and repair the data set, send=, or the teacher"
            )
        patience_s, where = self.teachers.patience_s, self.teachers.source
        is_hopeless = (
            not outlook.ready
            and bool(outlook.faults)
            and all(fault.is_lasting for fault in outlook.faults.values())
            and min(outlook.short_s, waited_s) >= min(_LASTING_S, patience_s)
        )
        if waited_s < patience_s and not is_hopeless:
            return
        how = "can be used" if is_hopeless else f"has answered for {waited_s:.0f} s"
        if outlook.ready:
            reasons = f"{outlook.ready} are connected, and none of them answers"
        elif outlook.faults:
            reasons = _reasons(outlook)
        else:
            problem = "no server has replied yet" if self.finding is None else self.finding.problem
            reasons = problem or "the source lists none"
        start = "the servers" if self.finding is None else "some with 'edl-hvd teach'"
        raise NoTeacherError(
            f"no teacher of {where!r} {how}, and {what} waits for one: {reasons}; expected at least one: see "
            f"'edl-hvd teachers {where}', and start {start}"
        )


def _reasons(outlook: Outlook) -> str:
    return "; ".join(f"{address}: {fault.why}" for address, fault in sorted(outlook.faults.items()))
