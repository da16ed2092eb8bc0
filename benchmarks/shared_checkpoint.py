"""Checkpoints of several ranks to S3 and back, beside ``torch.distributed.checkpoint`` over ``s3torchconnector``.

    python benchmarks/shared_checkpoint.py [--ranks 2] [--size-mb 512] [--turns 5] [--step-turns 9]
        [--limit-mb-per-s 80] [--only-steps]

Each rank is a process that holds the same state, so each writes a part of it, and each holds all of it in the end. Two
servers on this machine take turns (``storage_sink.py``): one as fast as sockets go, and one that carries so much per
connection, as S3 does. Speeds are of the whole state, until it is listed, or the last rank holds it; medians. In
brackets the processor time of all ranks, and of the server, per GB: it takes no less time than that on its cores.

Then what a checkpoint on its way costs training: the time of a step (a matrix product of one thread on each rank) while
one is uploaded, against that without, in turn; with the share of the processors that an upload has by default, and
with all of them. First the server takes its time from the same cores; then ("apart") it has one to itself, as on
another machine, and each rank, of which there may be fewer, one that all its threads share.
``torch`` is left out where ``pip install 's3torchconnector[dcp]'`` was not run.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed
from storage import sink

from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.checkpoint.writing.throttle import CpuThrottle
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.events import CheckpointWritten
from edl_hvd.settings import Settings
from edl_hvd.storage import open_storage
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.saving.shared_restore import SharedRestore
from edl_hvd.world import World

TENSOR_BYTES = 16 * 1024 * 1024
QUIET_S = 3.0
# As long as an upload that gives way takes.


class TorchCollectives(SoloCollectives):
    """Those of ``torch.distributed``, so that both use the same."""

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        torch.distributed.broadcast(tensor, root)

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        rows: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(rows, [int(number) for number in row])
        return rows


class Ours:
    name = "edl_hvd"

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self._storage = open_storage("s3://bucket/ours")
        self._writer = CheckpointWriter(self._storage, keep=1)
        self._step = 0

    def begin(self, share: float = 1.0) -> None:
        self._step += 1
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = os.sched_getaffinity(0)
        processors = share * (1.0 if len(own) == 1 else len(own) / size) if share < 1 else None
        cpu = CpuThrottle(processors, math.inf, SYSTEM_CLOCK)
        self._writer.begin(Snapshot(self._state, step=self._step), rank, size, f"attempt-{self._step}", cpu=cpu)

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def save(self) -> None:
        self.begin()
        events: list[Any] = []
        while self.busy and not events:
            events = self._writer.poll()
            time.sleep(0.002)
        events = events or self._writer.poll()
        assert torch.distributed.get_rank() or isinstance(events[0], CheckpointWritten), events

    def tidy(self) -> None:
        """What was there before is removed now."""
        assert self._writer.wait(600)

    def load(self) -> dict[str, torch.Tensor]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        world = World(1, rank, size, members=("",) * size)
        found = SharedRestore(self._storage, TorchCollectives(), world).newest(print)
        assert found is not None
        return dict(found.tensors)


class Torchs:
    name = "torch"

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        import torch.distributed.checkpoint as checkpoint
        from s3torchconnector import S3ClientConfig

        self._checkpoint = checkpoint
        self._state = state
        self._back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self._where: dict[str, Any] = {"region": "us-east-1", "s3client_config": S3ClientConfig(force_path_style=True)}

    def save(self) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(**self._where, path="s3://bucket/torch/", thread_count=2, overwrite=True)
        self._checkpoint.save(self._state, storage_writer=writer)

    def tidy(self) -> None:
        """It has replaced what was there before."""

    def load(self) -> dict[str, torch.Tensor]:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(**self._where, path="s3://bucket/torch/")
        self._checkpoint.load(self._back, storage_reader=reader)
        return self._back


class Cost(NamedTuple):
    """Seconds until the last rank has done it, and the processor's, of all ranks and of the server."""

    seconds: float
    ranks_s: float
    server_s: float


def cost(act: Callable[[], object]) -> Cost:
    torch.distributed.barrier()
    began_s, own_s, server_s = time.monotonic(), time.process_time(), server_processor_s()
    act()
    torch.distributed.barrier()
    seconds, server_s = time.monotonic() - began_s, server_processor_s() - server_s
    ranks_s = torch.tensor(time.process_time() - own_s)
    torch.distributed.all_reduce(ranks_s)
    return Cost(seconds, ranks_s.item(), server_s)


def server_processor_s() -> float:
    process = psutil.Process(int(os.environ["STORAGE_SINK_PROCESS"])).cpu_times()
    return float(process.user + process.system)


def rank_main(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    if arguments.server == "apart":
        stay_on(os.getpid(), processors()[arguments.rank])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(arguments.store, arguments.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks)
    torch.manual_seed(0)
    count = max(1, arguments.size_mb * 1_000_000 // TENSOR_BYTES)
    state = {f"layer.{number}": torch.rand(TENSOR_BYTES // 4 // 1024, 1024) for number in range(count)}
    size_mb = sum(tensor.nbytes for tensor in state.values()) / 1e6
    if arguments.steps:
        measure_steps(Ours(state), arguments)
        return
    clients: list[Any] = [Ours(state)]
    if find_spec("s3torchconnector"):
        clients.append(Torchs(state))
    costs: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(arguments.turns + 1):  # the first makes connections and finds memory
        for client in clients:
            up = cost(client.save)
            client.tidy()
            back: dict[str, torch.Tensor] = {}
            down = cost(lambda client=client, back=back: back.update(client.load()))
            if turn:
                costs.setdefault(("up", client.name), []).append(up)
                costs.setdefault(("down", client.name), []).append(down)
            else:
                assert all(torch.equal(back[name], tensor) for name, tensor in state.items()), client.name
    if arguments.rank == 0:
        for direction in ("up", "down"):
            found = {
                client.name: Cost(*map(statistics.median, zip(*costs[direction, client.name], strict=True)))
                for client in clients
            }
            cells = [
                f"{name} {size_mb / one.seconds:5.0f} MB/s "
                f"({1e3 * one.ranks_s / size_mb:.2f} + {1e3 * one.server_s / size_mb:.2f} s/GB)"
                for name, one in found.items()
            ]
            if "torch" in found:
                cells.append(f"{found['torch'].seconds / found['edl_hvd'].seconds:.2f} x torch")
            print(f"{arguments.server:>10} {direction:>5}   {'   '.join(cells)}", flush=True)
    torch.distributed.barrier()


def processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def stay_on(process: int, processor: int) -> None:
    """All of a process's threads, and those that they start."""
    for thread in psutil.Process(process).threads():
        os.sched_setaffinity(thread.id, {processor})


def measure_steps(ours: Ours, arguments: argparse.Namespace) -> None:
    for share in (Settings.checkpoint_cpu_fraction, 1.0):
        measure_steps_beside(ours, share, arguments)


def measure_steps_beside(ours: Ours, share: float, arguments: argparse.Namespace) -> None:
    matrix = torch.rand(700, 700)

    def step_s() -> float:
        began_s = time.monotonic()
        matrix @ matrix
        return time.monotonic() - began_s

    quiet, ratios, uploads_s = [], [], []
    for turn in range(arguments.step_turns + 1):
        torch.distributed.barrier()
        began_s, alone = time.monotonic(), []
        while time.monotonic() - began_s < QUIET_S:
            alone.append(step_s())
        torch.distributed.barrier()
        began_s, beside = time.monotonic(), []
        ours.begin(share)
        while ours.busy:
            beside.append(step_s())
        if turn:  # the first upload makes connections
            quiet.append(statistics.mean(alone))
            ratios.append(statistics.mean(beside) / quiet[-1])
            uploads_s.append(time.monotonic() - began_s)
    if arguments.rank == 0:
        print(
            f"{arguments.server:>10} steps   share {share:g}   {1e3 * statistics.median(quiet):.2f} ms, beside an "
            f"upload of {statistics.median(uploads_s):.1f} s {statistics.median(ratios):.3f} times as long "
            f"(in each turn: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})",
            flush=True,
        )
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--step-turns", type=int, default=9)
    parser.add_argument("--limit-mb-per-s", type=float, default=80)
    parser.add_argument("--only-steps", action="store_true", help="not the speeds")
    for name in ("--rank", "--store", "--server", "--steps"):  # for the ranks themselves
        parser.add_argument(name, help=argparse.SUPPRESS, **({"type": int} if name in ("--rank", "--steps") else {}))
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
        return
    if not find_spec("s3torchconnector"):
        print("torch.distributed.checkpoint is left out: s3torchconnector is not installed")
    limited = arguments.limit_mb_per_s * 1e6
    everything = [("unlimited", None, 0), ("limited", limited, 0), ("limited", limited, 1), ("apart", limited, 1)]
    for server, bytes_per_s, steps in everything[2:] if arguments.only_steps else everything:
        with sink(bytes_per_s), tempfile.TemporaryDirectory() as folder:
            count = arguments.ranks
            if server == "apart":
                stay_on(int(os.environ["STORAGE_SINK_PROCESS"]), processors()[-1])
                count = min(count, len(processors()) - 1)
            words = [sys.executable, __file__, "--server", server, "--steps", str(steps), "--ranks", str(count)]
            words += ["--store", str(Path(folder) / uuid.uuid4().hex)]
            for name in ("size_mb", "turns", "step_turns"):
                words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
            ranks = [
                subprocess.Popen([*words, "--rank", str(rank)], env={**os.environ, "OMP_NUM_THREADS": "1"})
                for rank in range(count)
            ]
            if sum(process.wait() for process in ranks):  # of all of them
                raise SystemExit("a rank has failed")


if __name__ == "__main__":
    main()
