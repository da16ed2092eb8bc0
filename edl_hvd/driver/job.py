"""Carries out what the membership decides: processes, the control port, one key-value store per generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TextIO

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.driver.control import Beat, Control, Message
from edl_hvd.driver.happenings import (
    Action,
    AskChange,
    Dismiss,
    Done,
    DrainAsked,
    End,
    Exited,
    Formed,
    Happening,
    HostsFound,
    Kill,
    Lost,
    Publish,
    Raised,
    Ready,
    SetAside,
    Spawn,
    TellGone,
    Tick,
    to_json,
)
from edl_hvd.driver.membership import Rules, advance, begin
from edl_hvd.driver.processes import Exit, WorkerProcess
from edl_hvd.driver.pulse import Pulse
from edl_hvd.errors import EdlHvdError
from edl_hvd.hosts import HostSlots
from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.settings import Driver

INTERRUPTED = 130  # 128 + SIGINT, as in a shell
_TICK_S = 0.05
_DRAIN_NOTICE_S = 120.0
# The notice that spot hosts get.
_LAST_WAIT_S = 5.0


class Starter(Protocol):
    """Starts a worker's process; see ``processes.Launcher``."""

    async def start(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess: ...


class Listener(Protocol):
    """Hears what happens, for people. Every method returns at once."""

    def happened(self, happening: Happening) -> None: ...

    def done(self, action: Action) -> None: ...

    def beat(self, worker: str, beat: Beat) -> None: ...


@dataclass(frozen=True)
class Network:
    """How workers reach the driver and each other.

    Attributes:
        address: Of the driver, for all workers.
        interface: Name that every host's network interface has, or ``None``: that which leads to the driver.
    """

    address: str
    interface: str | None


class Job:
    """One run of ``edlrun``.

    Args:
        rules: What the user allows.
        starter: Starts processes.
        network: How everybody is reached.
        listener: Hears what happens.
        record: Gets every happening as a JSON line, if given.
        clock: For everything but the event loop's own waits.
    """

    def __init__(
        self,
        rules: Rules,
        starter: Starter,
        network: Network,
        listener: Listener,
        record: TextIO | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._starter = starter
        self._network = network
        self._listener = listener
        self._record = record
        self._began_s = clock.monotonic_s()
        self.membership = begin(rules, 0.0)
        self._control = Control(self._knows, self._hear)
        self._port = 0
        self._processes: dict[str, tuple[int, WorkerProcess]] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._store: KeyValueStore | None = None
        self._known_step = -1
        self._pulse = Pulse(clock)
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Open the control port; before anything happens."""
        self._port = await self._control.start()

    async def run(
        self, end_all: Callable[[], bool] = lambda: False, end_now: Callable[[], bool] = lambda: False
    ) -> End:
        """From the first process to the last; leaves none behind, whatever happens.

        Args:
            end_all: Asked now and then; a true answer drains the whole job.
            end_now: The same; a true answer ends it without another commit.
        """
        draining = False
        try:
            while not self._ended.is_set():
                if end_now():
                    return End(INTERRUPTED, "interrupted")
                if end_all() and not draining:
                    draining = True
                    for entry in self.membership.hosts:
                        self.happen(DrainAsked(entry.host, _DRAIN_NOTICE_S))
                self._listen_to_hearts()
                self.happen(Tick())
                await asyncio.sleep(_TICK_S)
        finally:
            await self._clean_up()
        assert self.membership.end is not None
        return self.membership.end

    def happen(self, happening: Happening) -> None:
        """Take in what has happened and do what follows. In the event loop's thread."""
        now_s = self._clock.monotonic_s() - self._began_s
        if self._record is not None and not isinstance(happening, Tick):
            self._record.write(json.dumps({"at_s": round(now_s, 4), **to_json(happening)}) + "\n")
            self._record.flush()
        self._listener.happened(happening)
        self.membership, actions = advance(self.membership, happening, now_s)
        for action in actions:
            self._do(action)
            self._listener.done(action)

    def found(self, hosts: tuple[HostSlots, ...]) -> None:
        """Discovery's trusted list has changed."""
        self.happen(HostsFound(hosts))

    # --- what workers say ---

    def _knows(self, worker: str, life: int) -> bool:
        slot = self.membership.slots.get(worker)
        return slot is not None and slot.life == life and slot.state != "empty"

    def _hear(self, message: Message) -> None:
        worker, life, fields = message.worker, message.life, message.fields
        self._pulse.felt(worker, life)
        if "step" in fields:
            self._known_step = max(self._known_step, fields["step"])
        if message.what == "ready":
            self.happen(Ready(worker, life, fields["step"]))
        elif message.what == "formed":
            self.happen(Formed(worker, life, fields["generation"]))
        elif message.what == "raised":
            self.happen(Raised(worker, life, fields["step"], fields["error"]))
        elif message.what == "done":
            self.happen(Done(worker, life))
        elif message.what == "drain":
            self.happen(DrainAsked(worker, _DRAIN_NOTICE_S))
        elif message.what == "beat":
            self._listener.beat(worker, Beat(**fields))

    def _listen_to_hearts(self) -> None:
        for worker, life, reason in self._pulse.stopped():
            self.happen(Lost(worker, life, reason))

    # --- what is to be done ---

    def _do(self, action: Action) -> None:
        if isinstance(action, Spawn):
            task = asyncio.get_running_loop().create_task(self._live(action))
            self._lives.add(task)
            task.add_done_callback(self._lives.discard)
        elif isinstance(action, Publish):
            self._publish(action)
        elif isinstance(action, AskChange):
            for member in self.membership.world.members:
                self._control.send(member, "change", generation=action.generation)
        elif isinstance(action, TellGone):
            for member in self.membership.world.members:
                if member != action.worker:
                    self._control.send(member, "gone", generation=action.generation, worker=action.worker)
        elif isinstance(action, Dismiss):
            if not self._control.send(action.worker, "dismiss", save=action.save):
                self._signal(action.worker, action.life, WorkerProcess.terminate)
        elif isinstance(action, Kill):
            self._signal(action.worker, action.life, WorkerProcess.kill)
        elif isinstance(action, End):
            self._ended.set()
        else:
            assert isinstance(action, SetAside)  # for people only

    async def _live(self, spawn: Spawn) -> None:
        """One process, from its start to its end."""
        worker, life = spawn.worker, spawn.life
        try:
            process = await self._starter.start(worker, self._variables(worker, life))
        except (OSError, EdlHvdError) as error:
            self.happen(Exited(worker, life, clean=False, how=f"could not be started: {error}"))
            return
        self._processes[worker] = (life, process)
        if self.membership.slots[worker].state in ("dying", "dismissed"):
            process.kill()  # decided while it was being started
        self._pulse.begins(worker, life, process.pid)
        exit_: Exit = await process.wait()
        self._pulse.ends(worker)
        del self._processes[worker]
        self.happen(Exited(worker, life, clean=exit_.code == 0, how=exit_.text))

    def _variables(self, worker: str, life: int) -> dict[str, str]:
        host, _, number = worker.rpartition(":")
        driver = Driver(self._network.address, self._port, self._control.token, worker, life)
        return {
            **driver.as_environment(),
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_LOCAL_RANK": number,
        }

    def _publish(self, publish: Publish) -> None:
        if self._store is not None:
            self._store.close()  # nobody of an older generation may meet anybody here
        self._store = KeyValueStore(self._network.address)
        for member in publish.members:
            self._control.send(
                member,
                "world",
                generation=publish.generation,
                members=publish.members,
                store=(self._store.address, self._store.port),
                interface=self._network.interface,
                known_step=self._known_step,
            )

    def _signal(self, worker: str, life: int, how: Callable[[WorkerProcess], None]) -> None:
        known = self._processes.get(worker)
        if known is not None and known[0] == life:
            how(known[1])

    async def _clean_up(self) -> None:
        for _, process in list(self._processes.values()):
            process.terminate()
        if self._lives:
            await asyncio.wait(self._lives, timeout=_LAST_WAIT_S)
        for _, process in list(self._processes.values()):
            process.kill()
        if self._lives:
            await asyncio.wait(self._lives, timeout=_LAST_WAIT_S)
        self._control.close()
        if self._store is not None:
            self._store.close()
