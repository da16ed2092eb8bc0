"""The processes of the crash suite, all forked from one that has made the imports and the S3 clients.

That one, the nursery, has no threads and makes no requests; to fork it costs some milliseconds instead of the second
that a process takes to start.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as connection_pair
from pathlib import Path
from types import TracebackType
from typing import Any

from crash_plans import CHECKPOINTS, KEEP, AtCall, AtFileByte, Moment, assert_is_what_was_written, snapshot_of

from edl_hvd.checkpoint import CheckpointWriter, lease, restore_newest
from edl_hvd.checkpoint.lease import LeaseHolder
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.events import CheckpointFailed, CheckpointWritten
from edl_hvd.storage import Storage, StoredObject, open_storage, retries
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.pieces import Data, Pieces
from edl_hvd.storage.retries import Patience
from edl_hvd.storage.s3 import S3Storage

PATIENCE = Patience(stall_s=0.15, retry_for_s=20.0)
FIRST_PAUSE_S = 0.02  # between the attempts of a request: a tenth of what it is, as what it waits for is over sooner
SMALL_PARTS = Cut(part_bytes=512 * 1024, connections=4)
# A writer that waits for a killed one in vain gives up soon; a slow one may take longer than this.
WRITERS_PATIENCE_S = 1.0
FIRST_OWNER = 1
HANGS_S = 100.0  # only ends a test that would hang

_LOOK_S = 0.002
_LONELY_S = 1.5  # a rank that hears nothing from the others for that time ends


class Below:
    """A part of a storage, as one of its own. A client of S3 takes long to make, so all seeds share two."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, f"{folder}/"
        self.url = f"{storage.url}/{folder}"

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        return self._storage.read(self._folder + key, limit_bytes)

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        return self._storage.read_into(self._folder + key, start, buffer)

    def write(self, key: str, data: Any) -> None:
        self._storage.write(self._folder + key, data)

    def write_new(self, key: str, data: Any) -> None:
        self._storage.write_new(self._folder + key, data)

    def list(self, prefix: str = "") -> list[StoredObject]:
        length = len(self._folder)
        found = self._storage.list(self._folder + prefix)
        return [StoredObject(entry.key[length:], entry.size_bytes) for entry in found]

    def delete(self, key: str) -> None:
        self._storage.delete(self._folder + key)

    def exists(self, key: str) -> bool:
        return self._storage.exists(self._folder + key)

    def place_exists(self) -> bool:
        return self._storage.place_exists()

    def close(self) -> None:
        """The others go on with the client."""


@dataclass(frozen=True)
class Clients:
    """S3 as these processes and their test see it; both clients, because parts of 8 MiB are few and slow."""

    small: S3Storage
    large: S3Storage

    @classmethod
    def of(cls, bucket: str) -> Clients:
        return cls(S3Storage(bucket, "small", SMALL_PARTS, PATIENCE), S3Storage(bucket, "large", None, PATIENCE))

    def storage(self, folder: str, large: bool) -> Storage:
        return Below(self.large if large else self.small, folder)


@dataclass(frozen=True)
class Work:
    """What one process does.

    Attributes:
        act: See ``Plan``.
        folder: Of its checkpoints: a path, or what to append to the URL of the bucket if ``on_s3``.
        on_s3, large, moment, victims: See ``Plan``.
        rank, ranks: Of a writer.
        first_step: Of a writer.
        variant: Of what it writes.
        log: File in which it tells what was reported to it.
    """

    act: str
    folder: str
    on_s3: bool
    large: bool
    moment: Moment
    victims: tuple[int, ...]
    rank: int
    ranks: int
    first_step: int
    variant: int
    log: str


class World:
    """What the processes of one job share: their numbers, and how far each has come."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, 8 * 2 * size)
        self._size = size

    def set_pid(self, rank: int, pid: int) -> None:
        struct.pack_into("q", self._memory, 16 * rank, pid)

    def pid(self, rank: int) -> int:
        return int(struct.unpack_from("q", self._memory, 16 * rank)[0])

    def set_step(self, rank: int, step: int) -> None:
        """Rank 0 has begun this step; another rank has ended it."""
        struct.pack_into("q", self._memory, 16 * rank + 8, step)

    def step(self, rank: int) -> int:
        return int(struct.unpack_from("q", self._memory, 16 * rank + 8)[0])

    def next_step(self, rank: int, done: int) -> int | None:
        """The step to checkpoint next, once all are ready for it; ``None`` when nothing is to be expected."""
        deadline_s = time.monotonic() + _LONELY_S
        others = range(1, self._size)
        while time.monotonic() < deadline_s:
            if rank == 0 and all(self.step(other) >= done for other in others):
                return done + 1
            if rank != 0 and self.step(0) > done:
                return self.step(0)
            time.sleep(_LOOK_S)
        return None


def _stacks() -> str:
    """Where each thread of this process stands."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def write(work: Work, storage: Storage, world: World) -> None:
    """Write one checkpoint after the other, all ranks together, as a training does."""
    writer = CheckpointWriter(storage, KEEP, patience_s=WRITERS_PATIENCE_S)
    failures, step = 0, work.first_step - 1
    while failures < 2 and step < work.first_step + CHECKPOINTS - 1:
        following = world.next_step(work.rank, step)
        if following is None:
            return
        step = following
        if work.rank == 0:
            world.set_step(0, step)
        state = snapshot_of(step, work.variant, work.large)
        writer.begin(state, work.rank, work.ranks, f"life{work.variant}-{step}", FIRST_OWNER)
        if not writer.wait(HANGS_S):
            raise AssertionError(f"the writer of rank {work.rank} hangs at step {step}:\n{_stacks()}")
        for event in writer.poll():
            if isinstance(event, CheckpointFailed):
                failures += 1
                tell(work.log, failed=event.step, reason=event.reason)
            if isinstance(event, CheckpointWritten):
                tell(work.log, written=event.step)
        if work.rank != 0:
            world.set_step(work.rank, step)


def restore(work: Work, storage: Storage, world: World) -> None:
    assert_is_what_was_written(restore_newest(storage, _no_damage), work.large)


def take(work: Work, storage: Storage, world: World) -> None:
    lease.acquire(storage, LeaseHolder.this_process("another", SYSTEM_CLOCK), SYSTEM_CLOCK, take_over=True)


ACTS: dict[str, Callable[[Work, Storage, World], None]] = {"write": write, "restore": restore, "take": take}


def tell(log: str, **words: Any) -> None:
    """Add a line that outlives this process, whatever ends it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(words).encode() + b"\n")
    os.close(descriptor)


def told(log: Path) -> Iterator[dict[str, Any]]:
    """What was written so; of a process that died in the middle of a line, the lines before it."""
    yield from (json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n"))


def _no_damage(event: object) -> None:
    raise AssertionError(event)


def _die_within_a_file(moment: AtFileByte, storage: Storage) -> None:
    """Let the system end this process where it would write on in that file, whatever it is called until it is whole."""
    left = moment.number
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the main thread's right, and the writing is done by another
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def dying(write: Callable[[str, Data], None]) -> Callable[[str, Data], None]:
        def put(key: str, data: Data) -> None:
            nonlocal left
            left -= moment.word in key
            if left == 0:
                most = int(moment.share * Pieces.of(data).size_bytes)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            write(key, data)

        return put

    for name in ("write", "write_new"):
        setattr(storage, name, dying(getattr(storage, name)))


_CALLS_WITH_FILES = {"open", "os.mkdir", "os.rmdir", "os.link", "os.rename", "os.remove", "os.scandir"}


def _die_at_call(work: Work, moment: AtCall, world: World) -> None:
    """Kill the victims before the so manyth call of this process that names something of the kind in the folder."""
    left = moment.number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _CALLS_WITH_FILES and isinstance(arguments[0], str | Path):
            names = [str(name) for name in arguments[:2] if isinstance(name, str | Path)]
            if not names[0].startswith(work.folder) or not any(moment.word in name for name in names):
                return
            left -= 1
            if left == 0:
                for rank in sorted(work.victims, key=lambda rank: rank == work.rank):  # this process last
                    os.kill(world.pid(rank), signal.SIGKILL)

    sys.addaudithook(count)


@dataclass(frozen=True)
class _Fork:
    works: Sequence[Work]


@dataclass(frozen=True)
class _Go:
    """Those who were forked begin."""


@dataclass(frozen=True)
class _Reap:
    pid: int


def serve(descriptor: int, bucket: str) -> None:
    """The nursery: does what it is told until whoever tells it is gone."""
    line = Connection(descriptor)
    retries._FIRST_PAUSE_S = FIRST_PAUSE_S
    clients = Clients.of(bucket)
    if len(os.listdir("/proc/self/task")) > 1:
        raise AssertionError("the nursery has threads, so what it forks may hang")
    gate = -1
    children: set[int] = set()
    line.send("ready")
    while True:
        try:
            order = line.recv()
        except EOFError:
            break
        if isinstance(order, _Fork):
            world = World(len(order.works))
            waiting, gate = os.pipe()
            pids = [_fork(line, clients, work, world, waiting, gate) for work in order.works]
            os.close(waiting)
            for rank, pid in enumerate(pids):
                world.set_pid(rank, pid)
            children.update(pids)
            line.send(pids)
        elif isinstance(order, _Go):
            os.close(gate)
        else:
            children.discard(order.pid)
            line.send(os.waitstatus_to_exitcode(os.waitpid(order.pid, 0)[1]))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(line: Connection, clients: Clients, work: Work, world: World, waiting: int, gate: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        line.close()
        os.close(gate)
        os.read(waiting, 1)
        storage = clients.storage(work.folder, work.large) if work.on_s3 else open_storage(work.folder)
        if isinstance(work.moment, AtCall) and work.moment.rank == work.rank:
            _die_at_call(work, work.moment, world)
        if isinstance(work.moment, AtFileByte) and work.moment.rank == work.rank:
            _die_within_a_file(work.moment, storage)
        ACTS[work.act](work, storage, world)
        tell(work.log, ended=work.rank)
        code = 0
    except BaseException:
        tell(work.log, error=traceback.format_exc())
    finally:
        os._exit(code)


class Child:
    """A process as the test sees it. Its number is its own until ``reap``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        return bool(select.select([self._end], [], [], timeout_s)[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def forget(self) -> None:
        os.close(self._end)


class Nursery:
    """The test's end of it."""

    def __init__(self, bucket: str, environment: dict[str, str]) -> None:
        self._line, theirs = connection_pair()
        code = "import sys, crash_processes; crash_processes.serve(int(sys.argv[1]), sys.argv[2])"
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), bucket],
            env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._line.recv()

    def fork(self, works: Sequence[Work]) -> list[Child]:
        """Processes that wait for ``go``."""
        self._line.send(_Fork(works))
        return [Child(pid) for pid in self._line.recv()]

    def go(self) -> None:
        self._line.send(_Go())

    def reap(self, child: Child) -> int:
        """The exit code of a process that has ended, negative for a signal."""
        self._line.send(_Reap(child.pid))
        code = self._line.recv()
        child.forget()
        return int(code)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        self._process.wait(30)
