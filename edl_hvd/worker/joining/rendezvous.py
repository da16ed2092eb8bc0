"""How a process becomes part of a world, and leaves it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.world import World

EX_TEMPFAIL = 75
"""Exit code of a worker that could not train on where it was, EX_TEMPFAIL: run me again."""


class GracefulExit(Exception):
    """This worker is to end: the launcher has no place for it any more, or is gone. Not an error.

    Attributes:
        code: Exit code for the process.
        save: Write the state to a checkpoint before.
        left_s: Seconds that are left for that; ``None`` if nobody knows.
    """

    def __init__(self, reason: str, code: int = 0, save: bool = False, left_s: float | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.save = save
        self.left_s = left_s


@dataclass(frozen=True)
class RendezvousInfo:
    """What a join ends in.

    Attributes:
        world: The new world.
        collectives: Its collectives.
        known_step: The furthest step that any member has ever heard of; a world whose members all
            lack the state, yet know of progress, has lost it.
    """

    world: World
    collectives: Collectives
    known_step: int


class Following(Protocol):
    """A newcomer that follows a world: what comes is worked through on the main thread."""

    level: bool
    complete: bool
    over: bool

    def work(self) -> None:
        """Work through one thing that came."""

    def abandon(self) -> None:
        """Stop."""


@dataclass(frozen=True)
class Handover:
    """How the training state is handed on while the training goes on.

    Attributes:
        invite: ``invite(address, secret)`` waits for a newcomer that knows the secret, and returns the port. Any
            thread.
        follow: ``follow(address, port, secret, deliver)`` follows a world from now on; ``deliver(following)`` is
            called, in another thread, whenever there is work.
    """

    invite: Callable[[str, str], int]
    follow: Callable[[str, int, str, Callable[[Any], None]], Following]


class Rendezvous(Protocol):
    """How to join a world. One per process; the loop calls join, leave, join, … and at last ``ended``."""

    elastic: bool
    """The world may change: a broken one is worth leaving and joining anew."""

    def join(self, known_step: int, held_step: int, handover: Handover | None = None) -> RendezvousInfo:
        """Block until this worker is part of a complete world.

        Args:
            known_step: The furthest step this worker has heard of, for the other members.
            held_step: The step of the state it holds; -1 if it holds none.
            handover: How this worker takes the state over from a world that trains, and gives it to newcomers of
                its own; some launchers make use of it.

        Raises:
            GracefulExit: This worker is to end.
            RendezvousError: No world could be formed in the time allowed.
        """

    def change_pending(self) -> bool:
        """The launcher wants another world; may be known to one rank only. Does not block."""

    def leave(self, broken: bool) -> None:
        """Leave the present world: ``broken`` when a collective of it failed, else while it still works."""

    def host_going(self, left_s: float) -> None:
        """This host will be gone in ``left_s`` seconds: leave at the next commit. Any thread."""

    def ended(self, step: int, error: BaseException | None) -> None:
        """The training function has returned, or ended in an error of the script's own; for the launcher."""
