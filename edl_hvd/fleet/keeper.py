"""The daemon of a fleet: hears what happens, keeps it, and does what :func:`~edl_hvd.fleet.turn.turn` decides.

It may be killed at any moment. Jobs go on with the hosts of their files; the next daemon reads what was kept, finds the
jobs' processes by number and start token, and does what was decided and not done.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.watch import HostWatch
from edl_hvd.driver.job_folder.requests import Requests
from edl_hvd.driver.measurements import WorkStatus
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.fleet import events, messages
from edl_hvd.fleet.answers import decide, read_request, what_if
from edl_hvd.fleet.events import FleetAction, FleetEvent
from edl_hvd.fleet.messages import FleetReply, FleetView, JobProgress, JobRow, Refused, word_of
from edl_hvd.fleet.planned import members_of
from edl_hvd.fleet.runs import Runs, RunView
from edl_hvd.fleet.state import Fleet, FleetJob, FleetRules, JobPhase, total
from edl_hvd.fleet.state_folder import file_is_gone, jobs_are_unknown, with_running_jobs
from edl_hvd.fleet.store import DISK_IS_FULL, FleetDiskFullError, FleetStore, FleetUnusableError
from edl_hvd.fleet.turn import free_slots, turn
from edl_hvd.json_values import as_fields, show
from edl_hvd.planning.family import shared_timings
from edl_hvd.process_identity import start_token
from edl_hvd.values import count

_TICK_S = 0.1
# Looking at a job's folder takes 30 µs; a slot that has become free is given on within this time.
_PLAN_EVERY_S = 1.0
_PLAN_PART = 0.05
# Of the time, at most, is spent on plans of which nothing but the time has changed.
_CURVE_EVERY_S = 5.0
_NEWS = 0.05
# Of a number: a smaller difference changes no plan that is worth the change.
_SHOW_EVERY_S = 1.0
_SHOW_SOON_S = 0.2
_POLL_S = 1.0
_LOCAL_POLL_S = 0.2
# As edlrun polls its own sources.


class Keeper:
    """One daemon. While its disk is full it decides nothing; requests are refused, and jobs go on.

    Args:
        folder: Folder of the fleet's state, held by this process alone; see :func:`~edl_hvd.fleet.state_folder.hold`.
        source: Where the hosts come from.
        rules: What the user of the daemon allows.
        environment: Variables that each job gets from the daemon.
        tell: Told what happens, for people: the job or claim that it is about (empty for the fleet), and a sentence.
        clock: For everything but the event loop's own waits.
        publish: Gets a view of the fleet once a second and soon after each change, for a page that shows it; ``None``:
            nobody looks.

    Attributes:
        fleet: The fleet as it stands.

    Raises:
        StorageError: What was kept does not read, or is gone while the folders of jobs are there.
    """

    def __init__(
        self,
        folder: Path,
        source: PolledSource,
        rules: FleetRules,
        environment: Mapping[str, str],
        tell: Callable[[str, str], None],
        clock: Clock = SYSTEM_CLOCK,
        publish: Callable[[FleetView], None] | None = None,
    ) -> None:
        self._publish = publish
        self._published: Fleet | None = None
        self._published_s = float("-inf")
        self._folder = folder
        self._source = source
        self._rules = rules
        self._tell = tell
        self._clock = clock
        self._runs = Runs(folder, environment)
        try:
            self._store = FleetStore(folder)
            if self._store.is_new() and (jobs := self._runs.found()):
                raise jobs_are_unknown(folder, jobs)
            kept = self._store.read()
        except FleetUnusableError as error:
            raise with_running_jobs(error, self._runs.found()) from error
        self.fleet = kept.fleet
        # The clock of the fleet goes on while no daemon runs, and never back.
        self._begin_s = kept.at_s + (max(0.0, clock.wall_s() - kept.wall_s) if kept.wall_s else 0.0)
        self._mono_s = clock.monotonic_s()
        self._views: dict[str, RunView] = {}
        self._rested: dict[str, JobRow] = {}
        self._curves_s: dict[str, float] = {}
        self._unwritten: set[str] = set()
        self._watch: HostWatch | None = None
        self._has_begun = False
        self._unkept_hosts: events.HostsListed | None = None
        self._full_since_s: float | None = None
        self._next_plan_s = 0.0
        self._happened: deque[tuple[FleetEvent, Callable[[], None]]] = deque()
        self._ending = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def now_s(self) -> float:
        """The moment on the fleet's clock."""
        # Rounded before any decision, so that a replay decides with the very numbers that were kept.
        return round(self._begin_s + self._clock.monotonic_s() - self._mono_s, 6)

    async def run(self) -> None:
        """Keep the fleet until SIGINT or SIGTERM. Jobs go on afterwards.

        Raises:
            PlatformError: The folder can hold no socket.
            StorageError: What happens cannot be kept, and nothing was done about it; or the file of the fleet is gone.
        """
        loop = asyncio.get_running_loop()
        requests = Requests(self._take, messages.LONGEST_LINE_BYTES)
        try:
            await requests.start(self._folder)
        except OSError as error:
            raise PlatformError(
                f"the folder {self._folder} can hold no socket: {error}; expected a folder on a local disk; name "
                "another --state"
            ) from error
        every_s = self._source.refresh_s or (_POLL_S if self._source.needs_packages else _LOCAL_POLL_S)
        watch = HostWatch(
            self._source.source,
            lambda hosts: _call(loop, self._hear_hosts, events.HostsListed(hosts)),
            lambda text: _call(loop, self._tell, "", text),
            every_s=every_s,
            clock=self._clock,
            damping=Damping() if self._source.is_damped else None,
        )
        self._watch = watch
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ending.set)
        try:
            watch.start()
            while not self._ending.is_set():
                self._check_place()
                try:
                    self._turn()
                except FleetDiskFullError as error:
                    self._wait_for_room(error)
                self._show()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _TICK_S)
            if self._failure is not None:
                raise self._failure
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            requests.close()
            await asyncio.to_thread(watch.close)
            self._store.close()

    def handle(self, event: FleetEvent, then: Callable[[], None] = lambda: None) -> None:
        """Take in what has happened, keep it, and do what follows. In the event loop's thread.

        What happens while something is done, as the start of a process, is taken in when all of that is done.

        Args:
            event: What happened.
            then: Called as soon as it is kept, before anything is done about it.

        Raises:
            StorageError: It cannot be kept; nothing was done about it.
        """
        self._happened.append((event, then))
        if len(self._happened) > 1:
            return
        try:
            while self._happened:
                self._handle(*self._happened[0])
                self._happened.popleft()
        finally:
            self._happened.clear()

    def _handle(self, event: FleetEvent, then: Callable[[], None]) -> None:
        before, now_s, began_s = self.fleet, self.now_s, self._clock.monotonic_s()
        after, actions = turn(before, event, now_s)
        took_s = self._clock.monotonic_s() - began_s
        if isinstance(event, events.TimePassed):
            self._next_plan_s = now_s + max(_PLAN_EVERY_S, took_s / _PLAN_PART)
        if after != before or actions:
            self._check_place()
            self._store.keep(before, after, now_s, self._clock.wall_s(), event, actions)
        self.fleet = after
        then()
        for action in actions:
            self._do(action)

    def _check_place(self) -> None:
        """Check that another daemon would find what this one keeps.

        Raises:
            StorageError: It would not: the file, or its folder, was removed, moved or replaced.
        """
        if not self._store.is_in_place():
            raise file_is_gone(self._folder, {job.name: job.pid for job in self.fleet.jobs.values()})

    # --- a full disk: nothing is decided until there is room, and jobs go on ---

    def _turn(self) -> None:
        """Take in what has happened since the last turn.

        Raises:
            FleetDiskFullError: There is no room for it. Each turn finds again what was not kept.
        """
        if self._full_since_s is not None:
            if not self._store.has_room():
                return
            for name in self.fleet.removing:
                self._remove(name)
        if not self._has_begun:
            self.handle(events.RulesGiven(self._rules), then=self._note_begun)
            self._adopt()
        if self._unkept_hosts is not None:
            self.handle(self._unkept_hosts, then=self._forget_hosts)
        for job in list(self.fleet.jobs.values()):
            if job.phase.is_alive and not job.pid:
                self._begin(job)
        self._look()
        if self.now_s >= self._next_plan_s:
            self.handle(events.TimePassed())
        is_started = all(job.pid or not job.phase.is_alive for job in self.fleet.jobs.values())
        if self._full_since_s is not None and is_started:
            self._tell("", f"there is room again, after {self.now_s - self._full_since_s:.0f} s; the fleet goes on")
            self._full_since_s = None

    def _note_begun(self) -> None:
        self._has_begun = True

    def _forget_hosts(self) -> None:
        self._unkept_hosts = None

    def _wait_for_room(self, error: object) -> None:
        if self._full_since_s is None:
            self._full_since_s = self.now_s
            self._tell("", f"{error}; nothing is decided until then, and jobs go on")

    def _hear_hosts(self, event: events.HostsListed) -> None:
        self._unkept_hosts = event
        try:
            self.handle(event, then=self._forget_hosts)
        except FleetDiskFullError as error:
            self._wait_for_room(error)
        except BaseException as error:
            self._end(error)

    def _hear(self, event: FleetEvent) -> None:
        """The same for what comes from elsewhere in the event loop: an error ends the daemon there."""
        try:
            self.handle(event)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._ending.set()

    # --- what is to be done ---

    def _do(self, action: FleetAction) -> None:
        match action:
            case events.StartRun(name):
                self._start(self.fleet.jobs[name])
            case events.GiveHosts(name):
                self._write_hosts(name)
            case events.EndRun(name):
                self._runs.signal(self.fleet.jobs[name], signal.SIGTERM)
            case events.KillRun(name):
                self._runs.signal(self.fleet.jobs[name], signal.SIGKILL)
            case events.RemoveFolder(name):
                self._remove(name)
            case events.Tell(about, text):
                self._tell(about, text)

    def _start(self, job: FleetJob) -> None:
        try:
            child = self._runs.prepare(job, shared_timings(members_of(self.fleet, job.spec.family)))
        except (OSError, ValueError) as error:  # a text that the encoding of this system lacks is a ValueError
            if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
                self._wait_for_room(f"job {job.name} could not be started: the disk is full ({error}); make room")
                return
            how = f"job {job.name} could not be started in {show(job.spec.folder)}: {error}"
            self.handle(events.RunEnded(job.name, 2, how, job.known_step))
            return
        self._unwritten.discard(job.name)
        started = events.RunStarted(job.name, child.pid, start_token(child.pid))
        self.handle(started, then=lambda: self._runs.let_go(child))

    def _remove(self, name: str) -> None:
        self._rested.pop(name, None)
        self._forget(name)
        try:
            self._runs.remove(name)
        except OSError as error:
            self._tell(name, f"its folder cannot be removed, which the next daemon tries again: {error}")
        else:
            self.handle(events.FolderRemoved(name))

    def _forget(self, name: str) -> None:
        """Keep nothing of how a job stood: thousands may have ended."""
        self._views.pop(name, None)
        self._curves_s.pop(name, None)
        self._runs.forget(name)

    def _write_hosts(self, name: str) -> None:
        job = self.fleet.jobs[name]
        if not job.given or not job.phase.is_alive:
            self._unwritten.discard(name)
            return
        try:
            self._runs.write_hosts(name, job.listed)
            self._unwritten.discard(name)
        except OSError as error:
            if name not in self._unwritten:
                self._tell(name, f"its hosts file cannot be written, which is tried again: {error}")
            self._unwritten.add(name)

    def _adopt(self) -> None:
        """Do what an earlier daemon decided and did not do. Jobs without a process are begun by each turn."""
        self._runs.clear_deleted()
        for job in self.fleet.jobs.values():
            if not job.pid:
                continue
            end = self._runs.ended(job)
            if end is not None:
                continue  # the next look takes it in
            self._tell(job.name, f"goes on as process {job.pid} with {count(total(job.given), 'slot')}")
            self._write_hosts(job.name)
            status = self._runs.view(job).status
            # A second signal would end it at once, without a checkpoint.
            if job.phase is JobPhase.STOPPING and (status is None or status.state != "stopping"):
                self._runs.signal(job, signal.SIGTERM)
        for name in self.fleet.removing:
            self._remove(name)

    def _begin(self, job: FleetJob) -> None:
        """Start a job whose start was decided and not kept; where it was told to end meanwhile, it has ended."""
        if job.phase is JobPhase.STARTING:
            self._start(job)
        else:
            self.handle(events.RunEnded(job.name, None, "it had not started", job.known_step))

    # --- how jobs stand ---

    def _look(self) -> None:
        for name in list(self._unwritten):
            self._write_hosts(name)
        for job in list(self.fleet.jobs.values()):
            if job.pid:
                end = self._runs.ended(job)
                view = self._views[job.name] = self._runs.view(job)
                self._observe(job, view)
                if end is not None:
                    self.handle(events.RunEnded(job.name, end.code, end.how, _known_step(view)))
                    self._forget(job.name)
            elif job.occupied:
                self._observe(job, self._runs.view(job))

    def _observe(self, job: FleetJob, view: RunView) -> None:
        """Tell the fleet if something has changed that matters for who gets what."""
        status = view.status
        has_trained = status is not None and status.generation > 0 and status.progress.step > 0
        known = job.start_s is not None
        work = WorkStatus() if status is None else status.work
        is_due = self.now_s - self._curves_s.get(job.name, float("-inf")) >= _CURVE_EVERY_S
        is_same = view.occupied == job.occupied and (known or not has_trained)
        if is_same and not (is_due and _says_more(work, job)):
            return
        self._curves_s[job.name] = self.now_s
        self.handle(
            events.RunObserved(
                job.name,
                view.occupied,
                _known_step(view),
                has_trained,
                work.curve,
                work.left,
                work.change_s,
                work.timings if job.spec.family else (),
            )
        )

    # --- what other terminals ask ---

    def _take(self, line: bytes) -> Mapping[str, Any]:
        reply = self._answer(line)
        return {"what": word_of(reply), **as_fields(reply)}

    def _answer(self, line: bytes) -> FleetReply:
        request = read_request(line)
        match request:
            case Refused():
                return request
            case messages.ViewRequest():
                return self.view()
            case messages.PlanRequest():
                try:
                    return what_if(self.fleet, request, self.now_s)
                except (UsageError, ArithmeticError, LookupError) as error:
                    return Refused(f"no plan can be made: {error}")
        if self._failure is not None:
            return Refused(f"the daemon ends: {self._failure}")
        verdict = decide(self.fleet, request)
        if verdict.event is not None:
            kept: list[bool] = []
            try:
                self.handle(verdict.event, then=lambda: kept.append(True))
            except FleetDiskFullError as error:
                self._wait_for_room(error)
                if not kept:
                    return Refused(f"{error}, and ask again", may_be_later=True)
            except BaseException as error:
                self._end(error)
                return Refused(f"it could not be kept: {error}")
        return verdict.reply

    def _show(self) -> None:
        if self._publish is None:
            return
        age_s = self.now_s - self._published_s
        if age_s >= _SHOW_EVERY_S or (age_s >= _SHOW_SOON_S and self.fleet is not self._published):
            self._published, self._published_s = self.fleet, self.now_s
            self._publish(self.view())

    def view(self) -> FleetView:
        """How the fleet stands."""
        now_s, fleet = self.now_s, self.fleet
        rows = tuple(self._row(job, now_s) for job in fleet.jobs.values())
        free = sum(max(0, slots) for slots in free_slots(fleet).values())
        trouble = None if self._watch is None else self._watch.trouble
        return FleetView(now_s, fleet.hosts, rows, tuple(fleet.claims.values()), free, fleet.lacking, trouble)

    def _row(self, job: FleetJob, now_s: float) -> JobRow:
        """How a job stands; the folder of one that has ended is read once."""
        known = self._rested.get(job.name)
        if known is not None and known.job is job:
            return known
        row = JobRow(job, self._progress(job), round(job.waited_by(now_s), 3), round(job.served_by(now_s), 3))
        if job.has_left:
            self._rested[job.name] = row
            self._forget(job.name)
        return row

    def _progress(self, job: FleetJob) -> JobProgress:
        view = self._views.get(job.name) or self._runs.view(job)
        status = view.status
        if status is None:
            return JobProgress(step=job.known_step)
        progress, is_alive = status.progress, job.phase.is_alive
        goodput = job.curve.at(total(job.given)) if job.curve is not None else 0.0
        left = job.left if status.work.left is None else status.work.left
        return JobProgress(
            state=status.state if is_alive else "",
            workers=status.size if is_alive else 0,
            step=max(progress.step, progress.known_step, job.known_step),
            samples_per_s=progress.samples_per_s if is_alive and status.state == "training" else None,
            saved_step=progress.saved_step,
            left_s=round(left / goodput, 1) if left is not None and goodput and is_alive else None,
        )


def _says_more(work: WorkStatus, job: FleetJob) -> bool:
    """Whether a job's measurements differ so far from what is known that a plan may: each time is a line of history."""
    curve, known = work.curve, job.curve
    if curve is not None:
        if known is None or known.sizes != curve.sizes or (job.change_s is None and work.change_s is not None):
            return True
        if any(abs(new - old) > _NEWS * old for new, old in zip(curve.goodput, known.goodput, strict=True)):
            return True
    if job.spec.family and {timing.plan for timing in work.timings} != {timing.plan for timing in job.timings}:
        return True
    return work.left is not None and (job.left is None or abs(work.left - job.left) > _NEWS * job.left)


def _known_step(view: RunView) -> int:
    return -1 if view.status is None else view.status.progress.known_step


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function, *arguments)
