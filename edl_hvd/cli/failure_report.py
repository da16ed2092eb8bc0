"""Find why a job has failed: the first failure since training last made progress, and that worker's last lines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edl_hvd.driver.membership.events import Exited, Exiting, Kill
from edl_hvd.driver.membership.state import host_of

_LAST_LINES = 20
# Lines: as much of a traceback as fits a screen.
_HINTS = {
    "killed by SIGKILL": "another process killed it; often that is the kernel, when memory runs out: see dmesg",
    "killed by SIGSEGV": "a crash in native code; with PYTHONFAULTHANDLER=1 the worker says where",
    "killed by SIGABRT": "native code gave up; its last lines may say why",
    "killed by SIGBUS": "often /dev/shm is full: give the container more shared memory",
}


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed. ``rank`` is -1 if it was not a member of the world of ``size``."""

    worker: str
    how: str
    rank: int
    size: int
    generation: int
    lines: tuple[str, ...]

    @property
    def heading(self) -> str:
        """
        >>> WorkerFailure("b:1", "exit code 1", 3, 4, 7, ()).heading
        'first failure: host b, slot 1, rank 3 of 4, generation 7: exit code 1'
        """
        host, slot = host_of(self.worker), self.worker.rpartition(":")[2]
        place = f"rank {self.rank} of {self.size}, generation {self.generation}"
        if self.rank < 0:
            place = "before it was a member of a world" if self.generation == 0 else "before it joined the others"
        return f"first failure: host {host}, slot {slot}, {place}: {self.how}"

    @property
    def hint(self) -> str:
        """A frequent cause of such an end; empty if there is none to name."""
        return _HINTS.get(self.how, "")


@dataclass(frozen=True)
class _Place:
    """The world that there was when a worker's process began to end."""

    members: tuple[str, ...]
    generation: int


class Failures:
    """Record of the last lines of every worker, and of the first failure since :meth:`forget`."""

    def __init__(self) -> None:
        self.first: WorkerFailure | None = None
        self._lines: dict[str, deque[str]] = {}
        self._reasons: dict[str, str] = {}
        self._places: dict[str, _Place] = {}  # of those whose process has begun to end
        self._over = False

    def line(self, worker: str, line: bytes) -> None:
        """Note a line that a worker printed."""
        text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # the last state of a progress bar
        self._lines.setdefault(worker, deque(maxlen=_LAST_LINES)).append(text)

    def killed(self, kill: Kill) -> None:
        """Note the reason for which a worker is about to be killed: it says more than the signal."""
        self._reasons[kill.worker] = kill.reason

    def close(self) -> None:
        """Note that the job is over: workers that end from now on did not fail."""
        self._over = True

    def ended(self, event: Exiting | Exited, members: tuple[str, ...], generation: int) -> None:
        """Note that a worker's process ends or has ended, and which members the world has."""
        place = self._places.pop(event.worker, _Place(members, generation))
        if isinstance(event, Exiting):
            self._places[event.worker] = place
            return
        lines, reason = self._lines.pop(event.worker, ()), self._reasons.pop(event.worker, "")
        if event.clean or self._over or self.first is not None:
            return
        rank = place.members.index(event.worker) if event.worker in place.members else -1
        how = f"{event.how}, because {reason}" if reason else event.how
        self.first = WorkerFailure(event.worker, how, rank, len(place.members), place.generation, tuple(lines))

    def forget(self, before: int) -> None:
        """Forget a failure from before the world of this generation, which goes on without it."""
        if self.first is not None and self.first.generation < before:
            self.first = None
