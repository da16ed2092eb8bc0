"""Who has left the present world, and how long a collective may still wait after that.

Horovod alone cannot be trusted to end a collective whose member is gone. Gloo does not tell a waiting sender that its
connection broke (``Pair::signalException`` passes over unbound buffers in ``tx_``), which then costs the Gloo timeout.
And a tensor handed to Horovod in the moment its thread gives up is never looked at again (``EnqueueTensorAllreduces``
asks ``shut_down`` before it queues, ``FinalizeTensorQueue`` runs in between), which waits for ever.
"""

from __future__ import annotations

from edl_hvd.clock import SYSTEM_CLOCK, Clock

# What is on its way from a member that left regularly still arrives, on a busy machine a little later.
_REGULAR_GRACE_S = 5.0
# Without a driver the workers agree at their next commit to stop. Who waits for longer is cut off from the others too,
# or one of them is stuck; all it can lose is what came after its last commit.
_ORPHAN_GRACE_S = 3.0
# Gloo sees most deaths itself, in milliseconds.
_BREAK_AFTER_S = 0.25
# Breaking the connections ends most waits, in milliseconds; more, because giving up may cost a new start.
_GIVE_UP_AFTER_S = 2.0


class Departures:
    """Of one world. Written by the thread that watches the members, read by the one that waits in a collective.

    Attributes:
        reason: Who is gone, for people; ``None`` as long as all are there. Without one of them no world forms.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._hopeless_s: float | None = None
        self.reason: str | None = None

    def note(self, reason: str, *, regular: bool) -> None:
        """A member has left: regularly, with all its collectives complete, or not."""
        self._note(reason, _REGULAR_GRACE_S if regular else 0.0)

    def note_orphaned(self) -> None:
        """The driver is gone: nobody will tell of members that leave."""
        self._note("the driver", _ORPHAN_GRACE_S)

    def _note(self, reason: str, grace_s: float) -> None:
        moment = self._clock.monotonic_s() + grace_s
        if self._hopeless_s is None or moment < self._hopeless_s:
            self._hopeless_s, self.reason = moment, reason

    def wait(self) -> Wait:
        """Of a collective that begins to wait now."""
        return Wait(self, self._clock.monotonic_s())

    def seconds_without_hope(self, since_s: float) -> float:
        """How long a wait that began at ``since_s`` has gone on without hope; at most 0 while there is some."""
        if self._hopeless_s is None:
            return 0.0
        return self._clock.monotonic_s() - max(self._hopeless_s, since_s)


class Wait:
    """One wait, measured against the departures."""

    def __init__(self, departures: Departures, since_s: float) -> None:
        self._departures = departures
        self._since_s = since_s

    @property
    def needs_help(self) -> bool:
        """A member is gone and nothing has ended the wait: break the connections."""
        return self._departures.seconds_without_hope(self._since_s) > _BREAK_AFTER_S

    @property
    def is_lost(self) -> bool:
        """That did not help either."""
        return self._departures.seconds_without_hope(self._since_s) > _GIVE_UP_AFTER_S
