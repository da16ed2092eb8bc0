"""How a process becomes part of a world, and leaves it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.world import World

EX_TEMPFAIL = 75
"""Exit code of a worker that could not train on where it was, EX_TEMPFAIL: run me again."""


@dataclass(eq=False)
class GracefulExit(Exception):
    """The end of this worker: the launcher has no place for it any more, or is gone. Not an error.

    Attributes:
        reason: Why, for people.
        code: Exit code for the process.
        save: Whether to write the state to a checkpoint before.
        remaining_s: Seconds until the process is killed; ``None`` if not known.
        job_goes_on: Function that tells whether the launcher, which is lost, lives, and the job goes on without this
            worker; blocks for some seconds at most. Where it is given, other workers end for the same reason and may
            hold the same commit: one of them saves it, and no launcher ends one that hangs. ``None`` elsewhere.
    """

    reason: str
    _: KW_ONLY
    code: int = 0
    save: bool = False
    remaining_s: float | None = None
    job_goes_on: Callable[[], bool] | None = None


@dataclass(frozen=True)
class RendezvousInfo:
    """What a join ends in.

    Attributes:
        world: The new world.
        collectives: Its collectives.
        known_step: The furthest step that the launcher or the members have told of; a world whose members all
            lack the state, yet know of progress, has lost it.
    """

    world: World
    collectives: Collectives
    known_step: int


class Replica(Protocol):
    """The state of a standby, which a member of a world that trains keeps up to date.

    Attributes:
        caught_up: Whether everything that has come is applied, up to a commit.
        closed: Whether nothing more will come.
    """

    caught_up: bool
    closed: bool

    def apply_next(self) -> None:
        """Apply one thing that came. Main thread."""

    def end_input(self) -> None:
        """Wait for nothing that has not come yet: the donor is dead. What has come is to be applied."""

    def abandon(self) -> None:
        """Stop, and hold no state."""


@dataclass(frozen=True)
class StateTransfer:
    """Ways to move the training state from a member to a standby while the training goes on.

    Attributes:
        serve: ``serve(address, secret)`` waits for a standby that knows the secret, and returns the port. Any thread.
        receive: ``receive(address, port, secret, deliver)`` takes the state over from now on; ``deliver(replica)`` is
            called, in another thread, whenever there is something to apply.
        held_step: The step of the state that this worker holds by now; -1 if it holds none.
    """

    serve: Callable[[str, str], int]
    receive: Callable[[str, int, str, Callable[[Any], None]], Replica]
    held_step: Callable[[], int]


class Rendezvous(Protocol):
    """How to join a world. One per process; the loop calls join, leave, join, … and at last ``ended``.

    A class that inherits from it gets the methods of a world that never changes, but for ``join`` and ``leave``.
    """

    elastic: bool
    """The world may change: a broken one is worth leaving and joining anew."""

    def join(self, known_step: int, held_step: int, transfer: StateTransfer | None = None) -> RendezvousInfo:
        """Block until this worker is part of a complete world.

        Args:
            known_step: The furthest step this worker has heard of, for the other members.
            held_step: The step of the state it holds; -1 if it holds none.
            transfer: Ways to take the state over as a standby, and to give it to standbys; some launchers use them.

        Raises:
            GracefulExit: This worker is to end.
            RendezvousError: No world could be formed in the time allowed.
        """

    def change_pending(self) -> bool:
        """The launcher wants another world; may be known to one rank only. Does not block."""
        return False

    def has_lost_member(self) -> bool:
        """A member of the present world is known to be gone, though no collective has failed yet. Does not block."""
        return False

    def leave(self, broken: bool) -> None:
        """Leave the present world: ``broken`` when a collective of it failed, else while it still works."""

    def on_preemption_notice(self, remaining_s: float) -> None:
        """Leave at the next commit, because this host will be gone in ``remaining_s`` seconds. Any thread."""
        return

    def ended(self, step: int, error: BaseException | None) -> None:
        """The training function has returned, or ended in an error of the script's own; for the launcher."""
        return
