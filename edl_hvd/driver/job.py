"""Carries out what the membership decides: processes, the control port, one key-value store per generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from edl_hvd import protocol
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.driver.assignment import ExpectedRank, assign
from edl_hvd.driver.control import Connected, Control, ProcessEnding, Unreachable
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.history import Recorder
from edl_hvd.driver.membership.state import Rules, begin, host_of
from edl_hvd.driver.membership.transition import SAVED
from edl_hvd.driver.network import Network, RendezvousEndpoint
from edl_hvd.driver.watch.health import Health
from edl_hvd.driver.workers.process import Exit, ProcessStarter, WorkerProcess
from edl_hvd.errors import EdlHvdError, InternalError
from edl_hvd.gpus import VISIBLE_DEVICES
from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.settings import Driver

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # 128 + SIGINT, as in a shell
_TICK_S = 0.05
_LAST_WAIT_S = 5.0
_DISCONNECT_AFTER_S = 1.0
# The others break with a lost member in milliseconds; its slot is not used again before this.


class Listener(Protocol):
    """Hears what happens, for people. Every method returns at once."""

    def on_event(self, event: events.MembershipEvent) -> None: ...

    def done(self, action: events.Action) -> None: ...

    def beat(self, worker: str, beat: protocol.Beat) -> None: ...

    def noticed(self, text: str) -> None:
        """A worker is slow, or keeps the others waiting."""


class Job:
    """One run of ``edlrun``.

    Args:
        rules: What the user allows.
        starter: Starts processes.
        network: How everybody is reached.
        listener: Hears what happens.
        record: Gets the history of the membership, if given; see ``history.py``.
        clock: For everything but the event loop's own waits.
        known_step: The furthest step that an earlier run of the job is known to have reached; -1 for none.
        termination_grace_s: What is left to whoever is told to end by SIGTERM: a worker, or the whole job.
        collective_timeout_s: How long all workers may wait for each other in different collectives.

    Attributes:
        known_step: The furthest step that was ever heard of.
    """

    def __init__(
        self,
        rules: Rules,
        starter: ProcessStarter,
        network: Network,
        listener: Listener,
        record: TextIO | None = None,
        clock: Clock = SYSTEM_CLOCK,
        known_step: int = -1,
        termination_grace_s: float = 30.0,
        collective_timeout_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        self._termination_grace_s = termination_grace_s
        self._seed = seed
        self._clock = clock
        self._starter = starter
        self._network = network
        self._listener = listener
        self._began_s = clock.monotonic_s()
        self.membership = begin(rules, 0.0)
        self._recorder = Recorder(record, self.membership)
        self._control = Control(self._is_expected, self._on_message, protocol.FROM_WORKER)
        self._port = 0
        self._processes: dict[str, tuple[int, WorkerProcess]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[str, ExpectedRank] = {}
        self._donors: dict[str, str] = {}  # the member that sends its state, by the worker that receives it
        self._store: KeyValueStore | None = None
        self.known_step = known_step
        self._health = Health(
            clock,
            self.handle,
            listener.noticed,
            self._note_straggler,
            self._note_deadlock,
            self._ask,
            collective_timeout_s,
        )
        self._ended = asyncio.Event()
        self._failure: EdlHvdError | None = None
        self._drained: set[str] = set()  # hosts, because the whole job is to end
        self._kills = False  # whoever is still there at the end is killed, without being asked to go

    @property
    def now_s(self) -> float:
        """The moment on the membership's clock, which begins with the job."""
        # Rounded before any decision, so that a replay decides with the very numbers that the history shows.
        return round(self._clock.monotonic_s() - self._began_s, 6)

    @property
    def processes(self) -> dict[str, int]:
        """Process numbers on this machine, by worker: the worker's own, or that of the ssh which leads to it."""
        return {worker: process.pid for worker, (_, process) in self._processes.items()}

    async def start(self) -> None:
        """Open the control port; before anything happens."""
        self._port = await self._control.start()

    async def run(
        self, end_all: Callable[[], bool] = lambda: False, end_now: Callable[[], bool] = lambda: False
    ) -> events.End:
        """From the first process to the last; leaves none behind, whatever happens.

        Args:
            end_all: Asked now and then; a true answer drains the whole job. Whoever is still there when the grace is
                over, because it does not move or saves for too long, is killed.
            end_now: The same; a true answer kills all workers at once.

        Raises:
            EdlHvdError: What has happened could not be taken in, wherever it was heard of.
        """
        ends_s: float | None = None
        try:
            while not self._ended.is_set():
                if end_now():
                    self._kills = True
                    return events.End(INTERRUPTED, "interrupted")
                if ends_s is None and end_all():
                    ends_s = self.now_s + self._termination_grace_s
                if ends_s is not None:
                    if self.now_s > ends_s:
                        self._kills = True
                        return events.End(SAVED, self._too_late())
                    self._drain_all(ends_s)
                with self._ends_job_at_error("a look at the workers"):
                    self._health.look(self.membership)
                self.handle(events.Tick())
                await asyncio.sleep(_TICK_S)
            if self._failure is not None:
                raise self._failure
        finally:
            await self._clean_up()
        assert self.membership.end is not None
        return self.membership.end

    def _drain_all(self, ends_s: float) -> None:
        """Leave every host, those too that discovery has found since."""
        for entry in self.membership.hosts:
            if entry.host not in self._drained:
                self._drained.add(entry.host)
                self.handle(events.DrainRequested(entry.host, max(0.0, ends_s - self.now_s)))

    def _too_late(self) -> str:
        """Why workers are killed that were to save and leave, for people."""
        there = sorted(self._processes)
        killed = f"{', '.join(there)} did not and {'were' if len(there) > 1 else 'was'} killed" if there else "did not"
        return (
            f"workers were asked to save and leave within {self._termination_grace_s:g} s (EDL_HVD_TERMINATION_GRACE), "
            f"but {killed}; run it again to go on at the newest checkpoint"
        )

    def handle(self, event: events.MembershipEvent) -> None:
        """Take in what has happened and do what follows. In the event loop's thread.

        An error ends the job, see :meth:`run`; nothing is taken in after it.
        """
        if self._failure is not None:
            return
        with self._ends_job_at_error(f"the event {type(event).__name__}"):
            now_s = self.now_s
            self._listener.on_event(event)
            self.membership, actions = self._recorder.transition(self.membership, event, now_s)
            started = [action.worker for action in actions if isinstance(action, events.Spawn)]
            told = {worker: place.rank for worker, place in self._places.items()}
            self._places.update(assign(self.membership, told, started))
            for action in actions:
                self._do(action)
                self._listener.done(action)

    @contextmanager
    def _ends_job_at_error(self, what: str) -> Iterator[None]:
        """Have :meth:`run` raise an error of this block.

        Connections, processes and requests are served by tasks of the event loop, and nobody looks at their results.
        """
        try:
            yield
        except Exception as error:
            if self._failure is not None:
                return
            if isinstance(error, EdlHvdError):
                self._failure = error
            else:
                logger.exception("the driver failed at %s", what)
                self._failure = InternalError(
                    f"the driver failed at {what}: {type(error).__name__}: {error}; this is a fault of edl_hvd: please "
                    "report it with the lines above; a new run goes on at the newest checkpoint"
                )
                self._failure.__cause__ = error
            self._ended.set()

    # --- what workers say ---

    def _is_expected(self, worker: str, incarnation: int) -> bool:
        slot = self.membership.slots.get(worker)
        return slot is not None and slot.incarnation == incarnation and slot.state != "empty"

    def _on_message(
        self, worker: str, incarnation: int, said: protocol.FromWorker | Connected | Unreachable | ProcessEnding
    ) -> None:
        with self._ends_job_at_error(f"the message {type(said).__name__} of {worker}"):
            self._take_in(worker, incarnation, said)

    def _take_in(
        self, worker: str, incarnation: int, said: protocol.FromWorker | Connected | Unreachable | ProcessEnding
    ) -> None:
        self._health.heard(worker, incarnation)
        if isinstance(said, protocol.Ready | protocol.Beat | protocol.Raised):
            self.known_step = max(self.known_step, said.step)
        match said:
            case protocol.Ready(step):
                self.handle(events.Ready(worker, incarnation, step))
            case protocol.CaughtUp(generation):
                self.handle(events.CaughtUp(worker, incarnation, generation))
            case protocol.ServingState(generation, standby, address, port):
                if self._donors.get(standby) == worker:
                    self._control.send(standby, protocol.ReceiveState(generation, address, port))
            case protocol.Formed(generation):
                self._donors.pop(worker, None)
                self.handle(events.Formed(worker, incarnation, generation))
            case protocol.Raised(step, error, hopeless, ends_job):
                self.handle(events.Raised(worker, incarnation, step, error, hopeless, ends_job))
            case protocol.Done():
                self.handle(events.Done(worker, incarnation))
            case protocol.Drain():
                if self.membership.slots[worker].state != "terminating":  # else the signal was the driver's own
                    self.handle(events.DrainRequested(worker, self._termination_grace_s))
            case protocol.PreemptionNotice(left_s):  # of its host; the worker itself tells people
                self.handle(events.DrainRequested(host_of(worker), left_s, deferred=True))
            case protocol.Beat():
                self._health.beat(worker, incarnation, said, self.membership)
                self._listener.beat(worker, said)
            case protocol.Waits():
                self._health.answered(worker, incarnation, said)
            case Connected():
                self._repeat_end(worker, incarnation)
            case ProcessEnding():
                self._end_transfers(worker, incarnation)
                self.handle(events.Exiting(worker, incarnation))
            case Unreachable():
                self._end_transfers(worker, incarnation)
                self.handle(events.Lost(worker, incarnation, "its host does not answer"))

    def _repeat_end(self, worker: str, incarnation: int) -> None:
        """A worker connects that was told to end before: its start has swallowed the signal, as a script's handler."""
        state = self.membership.slots[worker].state
        if state == "terminating":
            self._control.send(worker, protocol.ShutDown(save=False, left_s=None))
        elif state == "dying":
            self._signal(worker, incarnation, WorkerProcess.kill)

    def _end_transfers(self, donor: str, incarnation: int) -> None:
        """Let nobody wait for what a dead worker would have sent: its connections stay open for a while."""
        for standby, member in self._donors.items():
            if member == donor and self._is_expected(donor, incarnation):
                self._control.send(standby, protocol.DonorLost())

    def _ask(self, worker: str, generation: int, collectives: Sequence[str]) -> None:
        self._control.send(worker, protocol.Explain(generation, tuple(collectives)))

    def _note_deadlock(self, deadlocked: events.Deadlocked) -> None:
        self.handle(deadlocked)
        self._kills = self._ended.is_set()  # they come to no commit at which they would leave

    def _note_straggler(self, slow: protocol.StragglerFound) -> None:
        """Let rank 0 write it down, with everything else that happens to the job."""
        self._control.send(self.membership.world.members[0], slow)

    # --- what is to be done ---

    def _do(self, action: events.Action) -> None:
        members = self.membership.world.members
        match action:
            case events.Spawn():
                task = asyncio.get_running_loop().create_task(self._look_after(action))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case events.Publish():
                self._publish(action)
            case events.ReceiveState(worker, generation, donor):
                self._donors[worker] = donor
                connections = self._control.connections((donor, worker))
                endpoint = RendezvousEndpoint.of(connections)
                own = endpoint.address_for(connections[donor]) if donor in connections else None
                self._control.send(donor, protocol.ServeState(generation, worker, own))
            case events.RequestResize(generation):
                for member in members:
                    self._control.send(member, protocol.ResizeRequested(generation))
            case events.NotifyPeerLost(generation, worker):
                for member in members:
                    if member != worker:
                        self._control.send(member, protocol.PeerLost(generation, worker))
            case events.ShutDownWorker(worker, incarnation, save, left_s):
                if not self._control.send(worker, protocol.ShutDown(save, left_s)):
                    self._signal(worker, incarnation, WorkerProcess.terminate)
            case events.Kill(worker, incarnation):
                self._signal(worker, incarnation, WorkerProcess.kill)
            case events.End():
                self._ended.set()
            case events.QuarantineHost():
                pass  # for people only

    async def _look_after(self, spawn: events.Spawn) -> None:
        with self._ends_job_at_error(f"the process of {spawn.worker}"):
            await self._run_process(spawn)

    async def _run_process(self, spawn: events.Spawn) -> None:
        """One process, from its start to its end."""
        worker, incarnation = spawn.worker, spawn.incarnation
        try:
            address = await asyncio.to_thread(self._network.toward, host_of(worker))
            process = await self._starter.start(worker, self._variables(worker, incarnation, address))
        except (OSError, EdlHvdError) as error:
            self.handle(
                events.Exited(worker, incarnation, clean=False, how=f"could not be started: {error}", began=False)
            )
            return
        self._processes[worker] = (incarnation, process)
        if self._kills or self.membership.slots[worker].state in ("dying", "terminating"):
            process.kill()  # decided while it was being started
        self._health.begins(worker, incarnation, process)
        exit_: Exit = await process.wait()
        self._health.ends(worker)
        del self._processes[worker]
        # When only the ssh that led to it has ended, it lives on, until it hears that it is no member any more. Not at
        # once: it would ask the others to leave with it at the next commit, while they already break with it.
        asyncio.get_running_loop().call_later(_DISCONNECT_AFTER_S, self._control.disconnect, worker, incarnation)
        began = exit_.problem is None or not exit_.certain
        self.handle(events.Exited(worker, incarnation, clean=exit_.code == 0, how=exit_.text, began=began))

    def _variables(self, worker: str, incarnation: int, address: str) -> dict[str, str]:
        place = self._places[worker]
        token, seed = self._control.token, self._seed
        driver = Driver(address, self._port, token, worker, incarnation, place.rank, place.size, place.local_size, seed)
        # No variable tells Horovod a place in a world before there is one: its init() would wait for others, or abort.
        return {
            **driver.as_environment(),
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": host_of(worker),
            **self._device(worker),
        }

    def _device(self, worker: str) -> dict[str, str]:
        """The variable that shows a worker its own GPU and no other, where its host is listed with devices."""
        host, _, slot = worker.rpartition(":")
        devices = next((entry.devices for entry in self.membership.hosts if entry.host == host), ())
        return {VISIBLE_DEVICES: str(devices[int(slot)])} if int(slot) < len(devices) else {}

    def _publish(self, publish: events.Publish) -> None:
        if self._store is not None:
            self._store.close()  # nobody of an older generation may meet anybody here
        connections = self._control.connections(publish.members)
        endpoint = RendezvousEndpoint.of(connections)
        self._store = KeyValueStore(endpoint.address, endpoint.allowed_peers.__contains__, token=self._control.token)
        for member, connection in connections.items():
            world = protocol.WorldAssigned(
                generation=publish.generation,
                members=publish.members,
                store_address=connection.local,
                store_port=self._store.port,
                interface=self._network.interface,
                address=endpoint.address_for(connection),
                known_step=self.known_step,
            )
            self._control.send(member, world)

    def _signal(self, worker: str, incarnation: int, how: Callable[[WorkerProcess], None]) -> None:
        known = self._processes.get(worker)
        if known is not None and known[0] == incarnation:
            how(known[1])

    async def _clean_up(self) -> None:
        for end in (WorkerProcess.kill if self._kills else WorkerProcess.terminate, WorkerProcess.kill):
            for _, process in list(self._processes.values()):
                end(process)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_WAIT_S)
        self._control.close()
        if self._store is not None:
            self._store.close()
        self._recorder.flush()
