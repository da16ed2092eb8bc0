"""Whole jobs in one process: each worker is a thread that runs a script, and one of them runs at a time.

Every worker has the process's globals to itself while it runs: its place in the world, its position in the loop, the
random generators. It runs up to where it has to wait for others. So a job of four workers takes no longer than four
jobs of one, and a job whose workers wait for each other in different places fails at once instead of hanging.

A **fault** happens at a worker's n-th collective: it is killed, and the others' collectives fail from then on; or hosts
are changed, and all agree at a commit to form another world.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from edl_hvd.errors import WorldBrokenError
from edl_hvd.settings import Launch
from edl_hvd.worker import process
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.rendezvous import GracefulExit, RendezvousInfo
from edl_hvd.worker.position import position
from edl_hvd.worker.process import Process
from edl_hvd.worker.progress import progress
from edl_hvd.world import World


@dataclass(frozen=True)
class Fault:
    """What happens to a job.

    Attributes:
        collective: When ``worker`` is about to make that many collectives of its first world.
        worker: Number of the worker.
        leaves: Workers that end: killed, or told to go where ``politely``.
        joins: Workers that are started.
        politely: The change is agreed on at a commit.
        torn: Workers that do not get the result of this collective, which the others get: ``worker`` dies after it has
            given its part. So they come apart.
    """

    collective: int
    worker: int = 0
    leaves: tuple[int, ...] = ()
    joins: int = 0
    politely: bool = False
    torn: tuple[int, ...] = ()


class Killed(BaseException):
    """A process ends here: since it was killed none of its collectives has succeeded, and it joins no world."""


class Deadlock(Exception):
    """Every worker waits for another one."""


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class _Worker:
    number: int
    process: Process
    globals: dict[str, Any] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=_taken)
    waits_for: Callable[[], bool] | None = None
    waits_in: str = ""
    is_over: bool = False
    is_killed: bool = False
    result: Any = None
    error: BaseException | None = None
    collectives: int = 0


class Simulation:
    """One job.

    Args:
        size: Workers of its first world.
        fault: What happens to it, if anything.

    Attributes:
        has_struck: Whether the moment of the fault has come.
    """

    def __init__(self, size: int, fault: Fault | None = None) -> None:
        self._fault = fault
        self.has_struck = False
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._script: Callable[[], Any] = lambda: None
        self.generation = 1
        self.members = list(range(size))
        self._size = size
        self._broken: set[int] = set()  # generations
        self._pending = False
        self._laid: dict[Any, dict[int, Any]] = {}
        self._torn: Any = None  # a collective
        self._left: set[tuple[int, int]] = set()  # generation and worker
        self.worlds: list[list[int]] = []

    @property
    def collectives(self) -> list[int]:
        """So many each worker has made."""
        return [worker.collectives for worker in self._workers]

    # --- running ---

    def run(self, script: Callable[[], Any]) -> list[Any]:
        """What ``script()`` returns on each worker that comes to its end; raises the first error of any."""
        self._script = script
        before = self._take_globals(), process._process
        numpy_before = numpy.random.get_bit_generator()
        progress_before = dict(progress.__dict__)
        try:
            for _ in range(self._size):
                self._start_worker(before[0])
            self._pass_on(None)
            for thread in self._threads:  # grows while workers are started
                thread.join()
        finally:
            self._put_globals({**before[0], "numpy": numpy_before})
            process._process = before[1]
            progress.__dict__.update(progress_before)
            position.leave()
        errors = [worker.error for worker in self._workers if worker.error is not None]
        first = [error for error in errors if not isinstance(error, (WorldBrokenError, Deadlock))] or errors
        if first:
            raise first[0]
        return [worker.result for worker in self._workers if not worker.is_killed]

    def _start_worker(self, globals_: dict[str, Any]) -> None:
        number = len(self._workers)
        worker = _Worker(number, Process(Launch.from_environment(), _Rendezvous(self, number)))
        worker.globals = {**globals_, "numpy": _copied(globals_["numpy"])}
        self._workers.append(worker)
        thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, worker: _Worker) -> None:
        worker.turn.acquire()
        self._enter(worker)
        try:
            worker.result = self._script()
            if worker.process.rendezvous.generation < self.generation:  # the others have to end without it
                self.members.remove(worker.number)
        except Killed:
            worker.is_killed = True
        except SystemExit:
            worker.is_killed = True  # told to go
        except BaseException as error:
            worker.error = error
            self._broken.add(self.generation)
        finally:
            worker.is_over = True
            self._pass_on(worker)

    def _take_globals(self) -> dict[str, Any]:
        return {
            "position": dict(position.__dict__),
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy": numpy.random.get_bit_generator(),  # one of each worker's own: its state takes ten times as long
        }

    def _put_globals(self, kept: dict[str, Any]) -> None:
        position.__dict__.update(kept["position"])
        torch.set_rng_state(kept["torch"])
        random.setstate(kept["random"])
        numpy.random.set_bit_generator(kept["numpy"])

    def _enter(self, worker: _Worker) -> None:
        process._process = worker.process
        self._put_globals(worker.globals)

    def wait(self, number: int, where: str, is_over: Callable[[], bool]) -> None:
        """Let others run until ``is_over()``.

        Raises:
            WorldBrokenError: The worker was killed meanwhile.
            Deadlock: Nobody can run.
        """
        if is_over():
            return
        worker = self._workers[number]
        worker.waits_for, worker.waits_in = lambda: worker.is_killed or is_over(), where
        worker.globals = self._take_globals()
        self._pass_on(worker)
        worker.turn.acquire()
        self._enter(worker)
        worker.waits_for = None
        if worker.is_killed:
            raise WorldBrokenError("this worker is killed")
        if not is_over():
            waits = "; ".join(f"worker {w.number} in {w.waits_in}" for w in self._workers if not w.is_over)
            raise Deadlock(f"all workers wait: {waits}")

    def _pass_on(self, worker: _Worker | None) -> None:
        """Give the turn to the next worker that can run; where none can, to any, who then finds the deadlock."""
        count = len(self._workers)
        first = 0 if worker is None else worker.number + 1
        others = [self._workers[(first + i) % count] for i in range(count)]
        alive = [other for other in others if not other.is_over]
        able = [other for other in alive if other.waits_for is None or other.waits_for()]
        if alive:
            (able or alive)[0].turn.release()

    # --- worlds ---

    def join(self, number: int) -> RendezvousInfo:
        """The next world, once all its members are there."""
        worker = self._workers[number]
        if worker.is_killed:
            raise Killed
        if worker.process.rendezvous.generation == self.generation:  # it has left this world
            self.wait(number, "leaving", lambda: worker.process.rendezvous.generation < self.generation)
        generation = self._gather_members(number)
        worker.process.rendezvous.generation = generation
        if not self.worlds or self.worlds[-1] != self.members:
            self.worlds.append(list(self.members))
        names = tuple(f"host{member}:0" for member in self.members)
        world = World.of(generation, names, self.members.index(number))
        return RendezvousInfo(world, _Collectives(self, number, generation, list(self.members)), -1)

    def _gather_members(self, number: int) -> int:
        """Wait until all members of a generation are there; its number."""
        while True:
            if number not in self.members:
                raise GracefulExit("this worker has no place any more")
            generation = self.generation
            here = self._laid.setdefault(("join", generation), {})
            here[number] = True
            self.wait(number, "joining", lambda: self.generation != generation or len(here) == len(self.members))  # noqa: B023
            if self.generation == generation:
                return generation

    def change(self) -> None:
        """The next generation begins."""
        fault = self._fault
        assert fault is not None
        self.members = [member for member in self.members if member not in fault.leaves]
        kept = self._take_globals()
        for _ in range(fault.joins):
            self.members.append(len(self._workers))
            self._start_worker(kept)
        self.generation += 1
        self._pending = False

    def change_pending(self) -> bool:
        return self._pending

    def left(self, number: int, generation: int) -> None:
        """A member has left its world."""
        self._left.add((generation, number))
        if self._pending:
            self.change()

    def exchange(self, number: int, generation: int, members: Sequence[int], key: Any, value: Any) -> Any:
        """Lay down a value for the other members, unless the fault happens here; a handle."""
        if self._workers[number].is_killed:
            raise WorldBrokenError("this worker is killed")
        laid = self._laid.setdefault(key, {})
        is_hit = self._is_hit(number)
        fault = self._fault
        if is_hit and fault is not None:
            if fault.torn:
                self._torn, laid[number] = key, value
            self._strike(fault)
            if self._workers[number].is_killed:
                raise WorldBrokenError("this worker is killed")
        if generation in self._broken and not self._may_succeed(key, generation):
            raise WorldBrokenError("a member is gone")
        laid[number] = value
        return key

    def _is_hit(self, number: int) -> bool:
        worker, fault = self._workers[number], self._fault
        worker.collectives += 1
        if fault is None or self.has_struck or (fault.worker, fault.collective) != (number, worker.collectives):
            return False
        self.has_struck = True
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.politely:
            self._pending = True
            return
        self._broken.add(self.generation)
        self.change()
        for leaver in fault.leaves:
            self._workers[leaver].is_killed = True

    def _may_succeed(self, key: Any, generation: int) -> bool:
        """In a broken world, where those that died last have given their parts of this collective before."""
        fault = self._fault
        return (
            fault is not None
            and self._torn is not None
            and self._torn[0] == generation
            and all(leaver in self._laid[key] for leaver in fault.leaves)
        )

    def _is_gone(self, number: int, generation: int) -> bool:
        """The worker makes no collective in this world any more."""
        worker = self._workers[number]
        is_there = worker.process.rendezvous.generation == generation and (generation, number) not in self._left
        return worker.is_over or not is_there

    def gather(self, number: int, generation: int, members: Sequence[int], key: Any) -> list[Any]:
        """What all members have laid down."""
        laid = self._laid[key]

        def is_over() -> bool:
            if len(laid) == len(members):
                return True
            if generation not in self._broken:
                return False
            missing = [member for member in members if member not in laid]
            return not self._may_succeed(key, generation) or any(self._is_gone(m, generation) for m in missing)

        self.wait(number, str(key[1]), is_over)
        fault = self._fault
        if len(laid) < len(members) or (fault is not None and key == self._torn and number in fault.torn):
            raise WorldBrokenError("a member is gone")
        return [laid[member] for member in members]


def _copied(generator: Any) -> Any:
    """A generator of numpy's that goes on from the same place."""
    copy = type(generator)()
    copy.state = generator.state
    return copy


class _Rendezvous:
    """See ``edl_hvd.worker.joining.rendezvous.Rendezvous``."""

    elastic = True

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation, self._number = simulation, number
        self.generation = 0

    def join(self, known_step: int, held_step: int, transfer: Any = None) -> RendezvousInfo:
        return self._simulation.join(self._number)

    def change_pending(self) -> bool:
        return self._simulation.change_pending()

    def has_lost_member(self) -> bool:
        return False

    def leave(self, broken: bool) -> None:
        self._simulation.left(self._number, self.generation)

    def on_preemption_notice(self, remaining_s: float) -> None:
        pass

    def ended(self, step: int, error: BaseException | None) -> None:
        pass


class _Collectives(SoloCollectives):
    """Of one worker in one world."""

    def __init__(self, simulation: Simulation, number: int, generation: int, members: Sequence[int]) -> None:
        self._simulation, self._number, self._generation, self._members = simulation, number, generation, members
        self._counts: dict[str, int] = {}

    def _lay(self, name: str, value: Any) -> Any:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        key = (self._generation, name, count)
        return self._simulation.exchange(self._number, self._generation, self._members, key, value)

    def _all(self, key: Any) -> list[Any]:
        return self._simulation.gather(self._number, self._generation, self._members, key)

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> Any:
        return self._lay(f"sum.{name}", tensor.detach() * scale), tensor

    def finish(self, handles: Sequence[Any]) -> None:
        for key, tensor in handles:
            with torch.no_grad():
                tensor.copy_(torch.stack(self._all(key)).sum(0))

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> Any:
        return "exchange", self._lay(f"exchange.{name}", tensor.detach().clone().split(list(sizes)))

    def start_gather(self, tensor: torch.Tensor, name: str) -> Any:
        return "gather", self._lay(f"gather.{name}", tensor.detach().clone())

    def result(self, handle: Any) -> torch.Tensor:
        kind, key = handle
        rank = list(self._members).index(self._number)
        found = self._all(key)
        return torch.cat([parts[rank] for parts in found] if kind == "exchange" else list(found))

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        found = torch.stack(self._all(self._lay(f"{name or op}.{tuple(tensor.shape)}", tensor.detach().clone())))
        return {"sum": found.sum, "max": found.amax, "min": found.amin}[op](0)

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        rank = list(self._members).index(self._number)
        given = self._all(self._lay("broadcast", tensor.detach().clone() if rank == root else None))[root]
        with torch.no_grad():
            tensor.copy_(given)

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        return [list(found) for found in self._all(self._lay("integers", [int(number) for number in row]))]
