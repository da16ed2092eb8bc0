"""The time between two worlds, in which training stands still: its start and its cause, and which members are lost."""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.clock import Clock
from edl_hvd.events import EventLog, Resized, StopCause, WorkerLost, WorldFormed
from edl_hvd.world import World


class Downtime:
    """An interruption of one worker's training: from the end of a world to the next commit.

    Args:
        events: Log for what happened between the worlds.
        clock: Clock of this worker.

    Attributes:
        before: The last world that has ended, if any.
        is_open: Whether training has stopped, and come to no commit since.
        resets_without_commit: Number of worlds of the same members, in a row, that broke before their first commit.
    """

    def __init__(self, events: EventLog, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._stopped: tuple[StopCause, float] | None = None  # why and when
        self.is_open = False
        self.before: World | None = None
        self.resets_without_commit = 0

    @property
    def generation(self) -> int:
        """The generation of the last world; 0 for none."""
        return self.before.generation if self.before else 0

    def begin(self, cause: StopCause, world: World | None) -> None:
        """Note that training stops.

        Args:
            cause: Why it does.
            world: World that ends; ``None`` if it had not begun.
        """
        self.is_open = True
        if self._stopped is None:
            self._stopped = (cause, self._clock.monotonic_s())
        elif cause == "failure":  # a world that breaks before its first commit prolongs the stop
            self._stopped = (cause, self._stopped[1])
        last, self.before = self.before, world or self.before
        if cause == "failure":
            is_same = last is not None and self.before is not None and last.members == self.before.members
            self.resets_without_commit = self.resets_without_commit + 1 if is_same else 1

    def end(self) -> None:
        """Note that training has come to a commit."""
        self._stopped, self.resets_without_commit, self.is_open = None, 0, False

    def announce(self, world: World, generations: Sequence[int], step: int) -> None:
        """Write what happened between the worlds, from the first rank that was in the last one.

        Args:
            world: New world.
            generations: Generation of the last world of each of its members, 0 for none.
            step: Optimizer step at which training goes on.
        """
        last = max(generations)
        if world.rank != generations.index(last):
            return
        self._events.emit(WorldFormed(world.generation, world.size, list(world.members), step))
        if self.before is None or self._stopped is None:
            return
        cause, stopped_s = self._stopped
        stayed = {world.members[rank] for rank, generation in enumerate(generations) if generation == last}
        if cause == "failure":
            for worker in self.before.members:
                if worker not in stayed:
                    self._events.emit(WorkerLost(world.generation, worker))
        seconds = round(self._clock.monotonic_s() - stopped_s, 4)
        self._events.emit(Resized(world.generation, self.before.size, world.size, cause, seconds, step))
