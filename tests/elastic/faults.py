"""Faults as data: what goes wrong, where, and to whom.

A test lists faults, the harness writes them into the job's folder, and every worker calls
``Points.reach`` wherever a fault may strike. A fault strikes once in a job, whoever gets there first.
This module is imported by the workers before anything else, so it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos import SeededFault

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
CRASH = "this failure was ordered by the test"


@dataclass(frozen=True)
class Fault:
    """Something a worker does to itself.

    Attributes:
        action: "kill" (SIGKILL), "stop" (SIGSTOP), "terminate" (SIGTERM), "raise" (``RuntimeError``), "break" (the
            error of a failed collective), "hang" (wait for ever), "freeze" (wait for ever in native code that holds
            Python's lock), "pause" (go on after ``seconds``), "pass" (nothing).
        at: Name of the point, see ``Points.reach``.
        worker: Only this worker, as ``host:local_rank``.
        rank: Only the worker of this rank.
        size: Only in a world of this size.
        step: Only at or after this step.
        visit: Only from this matching visit of the worker on, counted from 1.
        after: Only once the fault with this number (its place in the test's list) has struck, as often as it is to.
        times: How often it strikes in the whole job.
        seconds: How long a pause lasts.
    """

    action: str
    at: str = "step"
    worker: str | None = None
    rank: int | None = None
    size: int | None = None
    step: int | None = None
    visit: int = 1
    after: int | None = None
    times: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class HostChange:
    """The harness rewrites the hosts file.

    Attributes:
        add: Entries ``host:slots`` to add; one for a listed host changes its slots.
        drop: Names of hosts to take out.
        drop_rank: Take out the host of this rank.
        step: Once a worker has reached this step,
        size: and trains in a world of this size,
        after: and the fault with this number (its place in the test's list) has struck,
        delay_s: and seconds that have to pass from then on. Host changes happen in the order of the list.
    """

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    drop_rank: int | None = None
    step: int = 0
    size: int | None = None
    after: int | None = None
    delay_s: float = 0.0


@dataclass(frozen=True)
class RandomKill:
    """The harness sends SIGKILL to a worker chosen by the seed, at a moment chosen by the seed.

    The moment lies within ``within_s`` seconds after: the first worker process has started (``since="start"``), the
    first step ("step"), or the start of the first worker process that came after a step ("newcomer").
    """

    seed: int
    since: str
    within_s: float


@dataclass(frozen=True)
class Interrupt:
    """The harness sends a signal to the launcher when a worker has reached ``step``.

    Its main thread takes it, as the system has it nearly always, or ``to_another_thread`` does.
    """

    step: int
    signal_number: int = signal.SIGINT
    to_another_thread: bool = False


@dataclass(frozen=True)
class Outside:
    """Something befalls the job from outside, such as a pulled cable; ``act`` does it.

    Its moment is told as that of a :class:`HostChange`.
    """

    act: Callable[[], object]
    step: int = 0
    size: int | None = None
    after: int | None = None
    delay_s: float = 0.0


AnyFault = Fault | HostChange | RandomKill | Interrupt | Outside | SeededFault


def kill(**where: Any) -> Fault:
    return Fault("kill", **where)


def crash(**where: Any) -> Fault:
    return Fault("raise", **where)


def broken_collective(**where: Any) -> Fault:
    return Fault("break", **where)


def stop(**where: Any) -> Fault:
    return Fault("stop", **where)


def terminate(**where: Any) -> Fault:
    return Fault("terminate", **where)


def hang(**where: Any) -> Fault:
    return Fault("hang", **where)


def freeze(**where: Any) -> Fault:
    return Fault("freeze", **where)


def pause(seconds: float, **where: Any) -> Fault:
    return Fault("pause", seconds=seconds, **where)


def pass_by(**where: Any) -> Fault:
    """Nothing happens but that other faults may wait for it."""
    return Fault("pass", **where)


def add_host(host: str, **when: Any) -> HostChange:
    return HostChange(add=(host,), **when)


def remove_host(host: str | None = None, rank: int | None = None, **when: Any) -> HostChange:
    return HostChange(drop=() if host is None else (host,), drop_rank=rank, **when)


def save_faults(folder: Path, faults: Iterable[AnyFault]) -> None:
    """Write the faults where ``Points`` finds them; the number of a fault is its place in the list."""
    numbered = [asdict(fault) if isinstance(fault, Fault) else None for fault in faults]
    (folder / "faults.json").write_text(json.dumps(numbered))
    (folder / "fired").mkdir()


def mark_fired(folder: Path, number: int, times: int = 1) -> bool:
    """Claim one strike of fault ``number``; true for exactly ``times`` callers over all processes."""
    for strike in range(times):
        try:
            os.close(os.open(folder / "fired" / f"{number}.{strike}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def state_of(pid: int) -> str:
    """One letter, see proc(5): T is stopped, Z has ended, and so has who is not there."""
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("\nState:\t")[2][:1]
    except OSError:
        return "Z"


class Points:
    """The places of one worker where a fault may strike, and its trace.

    Points, in the order of a worker's life: "start" (nothing imported), "ready" (under edlrun: everything imported, the
    driver has been told so), "rendezvous" (about to meet the others), "following" (a newcomer is given a part of the
    state while the others train), "followed" (the last part), "forming" (all are about to start Horovod), "sync" (the
    world is complete, the state not yet agreed), "broadcast" (each part of the state that is sent or received),
    "callback" (a resize callback), "step" (batch in hand), "reduced" (gradients are reduced, the optimizer has not
    moved), "update" (the optimizer has moved), "commit" (its copy is about to be made), "committed" (it is made, the
    others have not heard), "leaving" (the world is about to be left), "shutdown" (Horovod is about to be shut down),
    "waiting" (a collective is not complete yet), "end". With "own_sigterm": "handles" (the script handles SIGTERM, and
    waits for one if a fault strikes) and "signalled" (it has come), after "start".
    """

    def __init__(self, folder: Path, broken: Callable[[], type[Exception]]) -> None:
        host, local_rank = os.environ.get("HOROVOD_HOSTNAME", "localhost"), os.environ.get("HOROVOD_LOCAL_RANK", "0")
        self.launched = "HOROVOD_HOSTNAME" in os.environ
        self.worker = os.environ.get("EDL_HVD_DRIVER_WORKER", f"{host}:{local_rank}")
        self.rank: int | None = None
        self.size: int | None = None
        self.step = 0
        self._folder = folder
        self._broken = broken
        faults = json.loads((folder / "faults.json").read_text())
        self._awaited = {str(number) for number, fault in enumerate(faults) if not fault or fault["at"] != "end"}
        self._faults = {number: Fault(**fields) for number, fields in enumerate(faults) if fields is not None}
        self._visits = dict.fromkeys(self._faults, 0)
        self._last_strike = [f"{number}.{(fault or {}).get('times', 1) - 1}" for number, fault in enumerate(faults)]
        (folder / "trace").mkdir(exist_ok=True)
        (folder / "sessions").mkdir(exist_ok=True)
        (folder / "sessions" / str(os.getsid(0))).touch()
        path = folder / "trace" / f"{host}.{local_rank}.{os.getpid()}.jsonl"
        self._trace = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, what: str, **fields: Any) -> None:
        """Append a line to this worker's trace. Clock: CLOCK_MONOTONIC, one for all processes of a machine."""
        line = {"t": time.monotonic(), "what": what, "worker": self.worker, "pid": os.getpid(), **fields}
        os.write(self._trace, json.dumps(line).encode() + b"\n")

    def reach(self, at: str) -> bool:
        """Strike with the first fault that waits at this point for this worker; whether one has, and let it live."""
        for number, fault in self._faults.items():
            if fault.at == at and self._matches(fault):
                self._visits[number] += 1
                if self._visits[number] >= fault.visit and mark_fired(self._folder, number, fault.times):
                    self._strike(number, fault)
                    return True
        return False

    def _matches(self, fault: Fault) -> bool:
        struck = fault.after is None or (self._folder / "fired" / self._last_strike[fault.after]).exists()
        return (
            struck
            and fault.worker in (None, self.worker)
            and fault.rank in (None, self.rank)
            and fault.size in (None, self.size)
            and (fault.step is None or self.step >= fault.step)
        )

    def _strike(self, number: int, fault: Fault) -> None:
        self.note("fired", fault=number, action=fault.action, at=fault.at, step=self.step)
        if fault.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.action])
            return
        if fault.action == "hang":
            threading.Event().wait()
        if fault.action == "freeze":
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
            while True:  # the second time; unlike sleep, it goes on after a signal
                lock(mutex)
        if fault.action == "pause":
            time.sleep(fault.seconds)
            return
        if fault.action == "pass":
            return
        raise self._broken()(CRASH) if fault.action == "break" else RuntimeError(CRASH)

    def over(self, linger_s: float) -> bool:
        """Whether every fault (but those at the end) has struck, the last one at least ``linger_s`` seconds ago."""
        struck = list((self._folder / "fired").iterdir())
        if not self._awaited <= {path.name.partition(".")[0] for path in struck}:
            return False
        return all(time.time() - path.stat().st_mtime >= linger_s for path in struck)

    def leavers_are_gone(self) -> bool:
        """Whether no more workers run than the world has; horovodrun's shell around one counts as part of it."""
        leaders = [int(path.name) for path in (self._folder / "sessions").iterdir()]
        return sum(is_alive(leader) for leader in leaders) <= (self.size or 1)

    def around(self, target: str, at: str, prepare: Callable[[], None] = lambda: None) -> None:
        """Make every call of ``module:function`` or ``module:Class.method`` reach a point first."""
        module_name, _, path = target.partition(":")
        holder: Any = importlib.import_module(module_name)
        *owners, name = path.split(".")
        for owner in owners:
            holder = getattr(holder, owner)
        original = getattr(holder, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            prepare()
            self.reach(at)
            return original(*args, **kwargs)

        setattr(holder, name, wrapper)
