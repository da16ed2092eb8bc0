"""Workers that only pretend to train, in virtual time, and a driver that watches them.

Each has a real ``Progress``. What it does next comes from a script of ``(phase, seconds)``: it is in the phase for so
long; a "collective" lasts until every worker of the world has come to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, TypeAlias

from clocks import FakeClock

from edl_hvd.driver.watch.hangs import HangDetector, HangReport, Hung
from edl_hvd.protocol import Beat, WorkerPhase
from edl_hvd.worker.progress import Progress

BEAT_S = 0.25
FOR_EVER = float("inf")
FakePhase: TypeAlias = Literal[WorkerPhase, "stepped"]
Script: TypeAlias = Iterable[tuple[FakePhase, float]]


def steps(seconds: Callable[[int], float] | float, count: int | None = None) -> Iterator[tuple[FakePhase, float]]:
    """Of a regular training: the phases of each batch. ``seconds`` is the time to compute it, or tells it."""
    for number in itertools.count() if count is None else range(count):
        yield "input", 0.0
        yield "compute", seconds(number) if callable(seconds) else seconds
        yield "collective", 0.0
        yield "commit", 0.0
        yield "collective", 0.0
        yield "stepped", 0.0


class FakeWorker:
    """One worker. ``silent``: it cannot say anything, although it runs; ``told``: what it calls its phase compute."""

    def __init__(self, clock: FakeClock, script: Script) -> None:
        self.progress = Progress(clock)
        self.silent = False
        self.told: WorkerPhase = "compute"
        self._clock = clock
        self._script = iter(script)
        self._until_s = clock.now_s
        self._wait: AbstractContextManager[None] | None = None

    @property
    def waits(self) -> bool:
        return self._wait is not None

    def go_on(self) -> None:
        """Do what the script says, up to now."""
        while self._wait is None and self._until_s <= self._clock.now_s:
            phase, seconds = next(self._script, ("end", FOR_EVER))
            if phase == "stepped":
                self.progress.steps += 1
                self.progress.step += 1
                self.progress.batches += 1
            elif phase == "collective":
                self._wait = self.progress.waiting()
                self._wait.__enter__()
            else:
                self.told = phase if phase in ("compile", "validation") else "compute"
                self.progress.enter("compute" if self.told == phase else phase)
                self._until_s = self._clock.now_s + seconds

    def finish_wait(self) -> None:
        assert self._wait is not None
        self._wait.__exit__(None, None, None)
        self._wait = None

    def beat(self, generation: int) -> Beat:
        beat = self.progress.beat(generation)
        return replace(beat, phase=self.told) if beat.phase == "compute" else beat


class FakeJob:
    """A world of workers and its watch. Time passes in :meth:`play` only."""

    def __init__(self, *scripts: Script) -> None:
        self.clock = FakeClock()
        self.workers = {
            f"{name}:0": FakeWorker(self.clock, script) for name, script in zip("abcdefgh", scripts, strict=False)
        }
        self.watch = HangDetector(self.clock.now_s)
        self.generation = 1
        self.warnings: list[str] = []
        self._silent_since: dict[str, float] = {}

    def play(self, seconds: float) -> Hung | None:
        """Let time pass; stops at the first worker that is found to be hung."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.sleep(BEAT_S)
            self._move()
            findings = self.look()
            self.warnings += findings.warnings
            if findings.hung:
                return findings.hung[0]
        return None

    def pause_driver(self, seconds: float) -> None:
        """The workers go on, the driver does not; what they said meanwhile reaches it all at once."""
        said = []
        for _ in range(int(seconds / BEAT_S)):
            self.clock.sleep(BEAT_S)
            self._go_on()
            said += [(worker, fake.beat(self.generation)) for worker, fake in self.workers.items()]
        for worker, beat in said:
            self.watch.heard(worker, 1, beat, self.clock.now_s)

    def look(self) -> HangReport:
        silent = {worker: self.clock.now_s - since for worker, since in self._silent_since.items()}
        silent = {worker: seconds for worker, seconds in silent.items() if seconds > 2.0}
        return self.watch.look(self.generation, list(self.workers), silent, self.clock.now_s)

    def _move(self) -> None:
        self._go_on()
        for worker, fake in self.workers.items():
            if fake.silent:
                self._silent_since.setdefault(worker, self.clock.now_s - BEAT_S)
            else:
                self._silent_since.pop(worker, None)
                self.watch.heard(worker, 1, fake.beat(self.generation), self.clock.now_s)

    def _go_on(self) -> None:
        for _ in range(1000):  # many batches may fit into a quarter of a second
            for fake in self.workers.values():
                fake.go_on()
            if not all(fake.waits for fake in self.workers.values()):
                return
            for fake in self.workers.values():
                fake.finish_wait()
