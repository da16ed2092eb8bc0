"""What ``edlrun`` shows: the workers' output, and one line for each change of the world, in plain words."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import BinaryIO

from edl_hvd.driver.control import Beat
from edl_hvd.driver.happenings import (
    Action,
    AskChange,
    End,
    Exited,
    Formed,
    Happening,
    Kill,
    Publish,
    SetAside,
)

_LAST_LINES = 20


class JobScreen:
    """See :class:`edl_hvd.driver.run.Screen`.

    Args:
        verbose: Tell also what the membership decides.
        timestamps: Put the time before each line of the workers.
    """

    def __init__(self, verbose: bool = False, timestamps: bool = False) -> None:
        self._verbose = verbose
        self._timestamps = timestamps
        self._members: tuple[str, ...] = ()
        self._formed: set[str] = set()
        self._before: tuple[str, ...] = ()
        self._since_s = time.monotonic()
        self._ends: dict[str, str] = {}
        self._last: dict[str, deque[str]] = {}
        self._first_failure: tuple[Exited, tuple[str, ...], list[str]] | None = None
        self._step = 0

    # --- the workers' output ---

    def line(self, worker: str, stream: str, line: bytes) -> None:
        """Pass a line on, with the rank of who printed it, as ``horovodrun`` does."""
        self._last.setdefault(worker, deque(maxlen=_LAST_LINES)).append(line.decode(errors="replace").rstrip("\n"))
        rank = str(self._members.index(worker)) if worker in self._members else worker
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        target: BinaryIO = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        target.write(f"{stamp}[{rank}]<{stream}>:".encode() + line + (b"" if line.endswith(b"\n") else b"\n"))
        target.flush()

    # --- what happens ---

    def happened(self, happening: Happening) -> None:
        if isinstance(happening, Exited) and not happening.clean:
            self._ends[happening.worker] = happening.how
            if self._first_failure is None:
                self._first_failure = happening, self._members, list(self._last.get(happening.worker, ()))
            if happening.worker in self._members and self._formed >= set(self._members):
                self._since_s = time.monotonic()
        if isinstance(happening, Formed):
            self._formed.add(happening.worker)
            if self._members and self._formed >= set(self._members):
                self._tell_world()

    def done(self, action: Action) -> None:
        if isinstance(action, AskChange):
            self._since_s = time.monotonic()
        elif isinstance(action, Publish):
            self._before = self._members if self._formed >= set(self._members) else self._before
            self._members, self._formed = action.members, set()
        elif isinstance(action, Kill):
            self._say(f"{action.worker} is ended: {action.reason}")
            self._ends[action.worker] = action.reason
        elif isinstance(action, SetAside):
            self._say(f"host {action.host} keeps failing and gets no workers for {action.seconds:.0f} s")
        if self._verbose:
            self._say(str(action))

    def beat(self, worker: str, beat: Beat) -> None:
        self._step = max(self._step, beat.step)

    def problem(self, text: str) -> None:
        self._say(f"discovery: {text}")

    def ended(self, end: End) -> None:
        if end.code == 1:
            self._report_failure()
        if end.reason:
            self._say(end.reason)

    def _tell_world(self) -> None:
        """One line about the world that has just formed, against the one before."""
        gone = [worker for worker in self._before if worker not in self._members]
        come = [worker for worker in self._members if worker not in self._before]
        words = []
        for worker in gone:
            words.append(f"{worker} lost ({self._ends.pop(worker)})" if worker in self._ends else f"{worker} left")
        if come and self._before:
            words.append(f"{', '.join(come)} joined")
        size = len(self._members)
        count = f"{size} worker{'s' if size > 1 else ''}"
        words.append(f"{count} {'go' if size > 1 else 'goes'} on" if self._before else f"training starts with {count}")
        if self._before:
            words += [f"step {self._step}", f"{time.monotonic() - self._since_s:.2f} s"]
        self._before = self._members
        self._say(" · ".join(words))

    def _report_failure(self) -> None:
        if self._first_failure is None:
            return
        exited, members, lines = self._first_failure
        rank = f", rank {members.index(exited.worker)} of {len(members)}" if exited.worker in members else ""
        self._say(f"first failure: {exited.worker}{rank}: {exited.how}; its last lines:")
        for line in lines:
            print(f"    {line}", file=sys.stderr)

    @staticmethod
    def _say(text: str) -> None:
        print(f"edlrun: {text}", file=sys.stderr, flush=True)
