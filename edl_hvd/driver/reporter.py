"""Stands between a job and those who watch it: passes on what happens, and makes a status of it now and then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.driver.job import Job, Listener
from edl_hvd.driver.measurements import Measurements, WorkStatus, work_left, work_status
from edl_hvd.driver.membership.events import Action, End, Exited, MembershipEvent, Tick
from edl_hvd.driver.membership.state import host_of
from edl_hvd.driver.preflight.gate import Gate
from edl_hvd.driver.status import LastHeartbeat, ProcessIdentity, Status, Throughput, describe
from edl_hvd.process_identity import start_token
from edl_hvd.protocol import Beat
from edl_hvd.timings import Timing

_SHOW_EVERY_S = 0.25
# A person sees no more than a few changes a second.
_WRITE_EVERY_S = 1.0
_FIT_EVERY_S = 10.0


class Screen(Listener, Protocol):
    """What a person sees of the job."""

    def line(self, worker: str, stream: str, line: bytes) -> None:
        """A worker has printed ``line``."""

    def problem(self, text: str) -> None:
        """Something is wrong outside the job, such as discovery."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def status(self, status: Status) -> None:
        """How the job stands; several times a second."""

    def ended(self, end: End) -> None:
        """The job is over."""


class Reporter:
    """A job's listener.

    Args:
        screen: Hears everything, and gets the status.
        write: Keeps the status; may block.
        begun: How the job stands before anything has happened, with what an earlier run of it has left.
        family: What other jobs of its family have measured.
        clock: Tells the time.
    """

    def __init__(
        self, screen: Screen, write: Callable[[Status], None], begun: Status, family: Sequence[Timing] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._screen = screen
        self._write = write
        self._clock = clock
        self._job: Job | None = None
        self._gate: Gate | None = None
        self._begun = begun
        self._progress = begun.progress
        self._throughput = Throughput()
        self._generation = 0
        self._heartbeats: dict[str, LastHeartbeat] = {}
        self._processes: dict[str, ProcessIdentity] = {}
        self._saved_s: float | None = None
        self._changed = True
        self._shown_s = self._written_s = float("-inf")
        self._writing: asyncio.Future[None] | None = None
        self._problem = self._told = ""
        self._measurements = Measurements(begun.work, family)
        self._work = begun.work
        self._fitted: tuple[Timing, ...] | None = None if family else begun.work.timings
        self._fitted_s = float("-inf")
        self._fitting: asyncio.Future[WorkStatus] | None = None

    def watch(self, job: Job, gate: Gate | None = None) -> None:
        """The job that this is the listener of, and what keeps hosts out of it."""
        self._job = job
        self._gate = gate

    # --- what happens ---

    def on_event(self, event: MembershipEvent) -> None:
        self._screen.on_event(event)
        if isinstance(event, Tick):
            self._look()
            return
        self._changed = True
        if isinstance(event, Exited):
            self._heartbeats.pop(event.worker, None)

    def done(self, action: Action) -> None:
        self._screen.done(action)
        self._changed = True

    def beat(self, worker: str, beat: Beat) -> None:
        self._screen.beat(worker, beat)
        if self._job is None:
            return
        now_s = self._job.now_s
        self._heartbeats[worker] = LastHeartbeat(beat, now_s)
        self._measure(beat, now_s)
        members = self._job.membership.world.members
        if members and worker == members[0] and beat.generation == self._job.membership.world.generation:
            self._measurements.update(beat, len(members), len({host_of(member) for member in members}), now_s)
            self._fit(now_s)
        # From now on there is something to lose, and a later run has to know it.
        self._changed = self._changed or self._progress.known_step <= 0 < beat.step
        if beat.saved_step > self._progress.saved_step:
            self._progress = replace(self._progress, saved_step=beat.saved_step)
            self._saved_s = now_s

    def noticed(self, text: str) -> None:
        self._screen.noticed(text)

    async def close(self, end: End) -> None:
        """Keep how it ended."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        status = self._describe() if self._job is not None else self._begun
        await asyncio.to_thread(self._keep, replace(status, at_s=self._clock.wall_s(), state="ended", end=end))

    # --- the status ---

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        if not self._changed and now_s - self._shown_s < _SHOW_EVERY_S:
            return
        status = self._describe()
        self._shown_s = now_s
        self._screen.status(status)
        if self._problem != self._told:
            self._told = self._problem
            if self._problem:
                self._screen.note(f"the job's status cannot be kept: {self._problem}; the job goes on")
        if (self._changed or now_s - self._written_s >= _WRITE_EVERY_S) and self._is_free():
            self._changed, self._written_s = False, now_s
            # Not here: a file system that hangs must not keep the job from recovering.
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._keep, status)

    def _is_free(self) -> bool:
        return self._writing is None or self._writing.done()

    def _keep(self, status: Status) -> None:
        try:
            self._write(status)
            self._problem = ""
        except OSError as error:
            self._problem = str(error)
        except Exception as error:  # nobody looks at the result of the thread
            self._problem = f"{type(error).__name__}: {error}"

    def _fit(self, now_s: float) -> None:
        """Now and then, in a thread: it takes some 20 ms."""
        if self._fitting is not None:
            if not self._fitting.done():
                return
            self._work, self._fitting = self._fitting.result(), None
        measured = self._measurements
        if measured.work is None:
            return
        is_new = measured.timings != self._fitted or measured.work.sizes
        if not is_new or now_s - self._fitted_s < _FIT_EVERY_S:
            return
        assert self._job is not None
        self._fitted, self._fitted_s = measured.timings, now_s
        slots = max((entry.slots for entry in self._job.membership.hosts), default=1)
        self._fitting = asyncio.get_running_loop().run_in_executor(
            None, work_status, measured.timings, measured.work, measured.size, slots, measured.family
        )

    def _measure(self, beat: Beat, now_s: float) -> None:
        """The job is as far as the first of its workers; a worker that has just been restored does not know yet."""
        if beat.generation < self._generation or beat.step == 0:
            return
        if beat.generation > self._generation:
            self._generation = beat.generation
            self._throughput.forget()
        elif beat.step < self._progress.step:
            return
        self._throughput.update(now_s, beat.samples)
        self._progress = replace(self._progress, step=beat.step, samples=beat.samples)

    def _describe(self) -> Status:
        assert self._job is not None
        job, now_s = self._job, self._job.now_s
        throughput = self._throughput.per_s(now_s)
        progress = self._progress = replace(
            self._progress,
            known_step=max(self._progress.known_step, job.known_step),
            samples_per_s=None if throughput is None else round(throughput, 2),
            saved_age_s=None if self._saved_s is None else round(now_s - self._saved_s, 1),
        )
        self._find(job.processes)
        status = describe(job.membership, now_s, self._clock.wall_s(), progress, self._heartbeats, self._processes)
        rejected = self._gate.rejected if self._gate is not None else ()
        left, change_s = work_left(self._measurements.work), self._measurements.change_s
        status = replace(status, work=replace(self._work, left=left, change_s=change_s))
        return replace(status, quarantined=status.quarantined + rejected)

    def _find(self, pids: Mapping[str, int]) -> None:
        """A process's mark does not change, and costs two files to read."""
        for worker in [worker for worker, known in self._processes.items() if pids.get(worker) != known.pid]:
            del self._processes[worker]
        for worker, pid in pids.items():
            if worker not in self._processes:
                with contextlib.suppress(OSError):
                    self._processes[worker] = ProcessIdentity(pid, start_token(pid))
