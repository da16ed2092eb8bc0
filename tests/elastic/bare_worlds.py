"""Ranks that start Horovod in one world after the other, as workers do, and nothing else; and strangers beside them."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from edl_hvd import key_value_store
from edl_hvd.errors import WorldBrokenError
from edl_hvd.key_value_store import KeyValueStore, StoreAddress
from edl_hvd.time_slice import ask_for_short_time_slices
from edl_hvd.worker.engine import horovod_runtime
from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime
from edl_hvd.world import World

VARIABLES = {
    "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_HOSTNAME": "localhost", "HOROVOD_ELASTIC": "1",
}  # fmt: skip
PATIENCE_S = 60.0


class AsReleased(HorovodRuntime):
    """Starts as the release of Horovod does, in the mended one."""

    def _prepare(self, world: World, store: StoreAddress) -> None:
        super()._prepare(world, store)
        del os.environ["HOROVOD_WORLD_KEY"], os.environ["HOROVOD_GLOO_RENDEZVOUS_TOKEN"]
        place = (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank, world.cross_size)
        path = f"/rank_and_size/localhost:{world.local_rank}"
        key_value_store.put(store, path, ",".join(map(str, place)).encode(), PATIENCE_S)


class Rank:
    """A process that joins worlds, and the pipes to it."""

    def __init__(self, slot: int, as_released: bool) -> None:
        self.name = f"localhost:{slot}"
        orders, self._orders = os.pipe()
        results, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            be_rank(self.name, as_released, orders, theirs)
        os.close(orders)
        os.close(theirs)
        self._results = os.fdopen(results, encoding="utf-8")

    def tell(self, **order: Any) -> None:
        with suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(order).encode() + b"\n")

    def result(self) -> dict[str, Any] | None:
        """``None`` if it has ended."""
        came, _, _ = select.select([self._results], [], [], PATIENCE_S)
        assert came, f"{self.name} still waits after {PATIENCE_S} s"
        line = self._results.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        """Kill it; a second time does nothing."""
        if self._results.closed:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._orders)
        self._results.close()


def be_rank(name: str, as_released: bool, orders: int, results: int) -> NoReturn:
    os.environ.update(VARIABLES)
    ask_for_short_time_slices()
    torch.set_num_threads(1)
    horovod_runtime._LEAVE_S = 1e6  # who leaves is not helped by the clock
    if "BARE_WORLDS_SPEAK" not in os.environ:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Gloo says as it fails
    runtime: HorovodRuntime = (AsReleased if as_released else HorovodRuntime)(elastic=True)
    news: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        with open(orders, encoding="utf-8") as lines:
            for line in lines:
                order = json.loads(line)
                if order["what"] == "gone":
                    runtime.end_world(order["generation"], "a rank")
                else:
                    news.put(order)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    collectives = None
    while True:
        order, result, began_s = news.get(), {}, time.monotonic()
        if order["what"] == "leave":
            runtime.stop(broken=False)
            result["left_after_s"] = time.monotonic() - began_s
        elif order["what"] == "sum":
            assert collectives is not None
            try:
                collectives.allreduce(torch.ones(8), "sum")
            except WorldBrokenError:
                runtime.stop(broken=True)
                result["broken"] = True
        else:
            members = order["members"]
            world = World.of(order["generation"], members, members.index(name))
            collectives = runtime.start(world, StoreAddress(**order["store"]))
            result["formed"] = collectives is not None
            result["started_after_s"] = time.monotonic() - began_s
            if collectives is not None and order["sums"]:
                total = collectives.allreduce(torch.full((8,), float(world.rank)), "sum")
                assert total.tolist() == [sum(range(world.size))] * 8
        os.write(results, json.dumps({**result, "at": time.monotonic()}).encode() + b"\n")


class Worlds:
    """Ranks that form one world after the other.

    Attributes:
        started_after_s: How long Horovod's start took in the last world, for the slowest rank.
    """

    def __init__(self, size: int, as_released: bool = False) -> None:
        self._as_released = as_released
        self._generation = 0
        self.started_after_s = 0.0
        self._store: KeyValueStore | None = None
        self.ranks = [Rank(slot, as_released) for slot in range(size)]

    def begin(self, sums: bool = True) -> float:
        """Tell all of the next world. Returns when."""
        if self._store is not None:
            self._store.close()
        self._generation += 1
        self._store = KeyValueStore("127.0.0.1", token="" if self._as_released else "secret")
        began_s = time.monotonic()
        for rank in self.ranks:
            members = [member.name for member in self.ranks]
            rank.tell(what="world", generation=self._generation, members=members, store=asdict(self._store.place),
                      sums=sums)  # fmt: skip
        return began_s

    def formed_at(self) -> float:
        """When the last of them had formed it."""
        results = [rank.result() for rank in self.ranks]
        assert all(result is not None and result["formed"] for result in results), results
        self.started_after_s = max(result["started_after_s"] for result in results if result is not None)
        return max(result["at"] for result in results if result is not None)

    def leave(self) -> float:
        """Returns how long the slowest of them took."""
        for rank in self.ranks:
            rank.tell(what="leave")
        results = [rank.result() for rank in self.ranks]
        assert None not in results
        return max(result["left_after_s"] for result in results if result is not None)

    def kill(self, victim: int) -> int:
        """Kill a rank, tell the others, and put a newcomer in its place. Returns how many others have ended, too."""
        self.ranks[victim].end()
        self.tell_gone(victim)
        ended = 0
        for rank in self._others(victim):
            result = rank.result()
            if result is None:
                ended += 1
            elif result["formed"]:  # before the death, or before it heard of it
                rank.tell(what="leave")
                ended += rank.result() is None
        self.replace(victim)
        return ended

    def tell_gone(self, victim: int) -> None:
        for rank in self._others(victim):
            rank.tell(what="gone", generation=self._generation)

    def replace(self, victim: int) -> None:
        """Put a newcomer in a rank's place, which is killed if it lives."""
        self.ranks[victim].end()
        self.ranks[victim] = Rank(int(self.ranks[victim].name.rpartition(":")[2]), self._as_released)

    def _others(self, victim: int) -> list[Rank]:
        return [rank for number, rank in enumerate(self.ranks) if number != victim]

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()
        if self._store is not None:
            self._store.close()


# Connects to whatever port of this host somebody begins to listen on, and stays silent, or says what nobody expects.
# With the argument "look" it looks for ports as often, and connects to none. It asks the kernel for listening sockets
# (SOCK_DIAG_BY_FAMILY, linux/inet_diag.h): /proc/net/tcp lists thousands of closed connections, too, which takes 30 ms.
STRANGER = """
import itertools, os, socket, struct, sys, time

QUESTION = struct.pack("=IHHII BBBBI48x", 72, 20, 0x301, 1, 0, socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 1 << 10)
DONE, ERROR = 3, 2

def listening():
    found = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
        kernel.send(QUESTION)
        while True:
            answer, start = kernel.recv(1 << 16), 0
            while start < len(answer):
                length, kind = struct.unpack_from("=IH", answer, start)
                if kind == DONE:
                    return found
                assert kind != ERROR, answer
                found.add(struct.unpack_from("!H", answer, start + 20)[0])
                start += length + -length % 4

before, kept = listening(), []
print("ready", flush=True)
for number in itertools.count():
    for port in listening() - before:
        if sys.argv[1:] == ["look"]:
            continue
        for says in (b"", os.urandom(64)):
            stranger = socket.socket()
            stranger.settimeout(0.1)
            try:
                stranger.connect(("127.0.0.1", port))
                stranger.send(says)
            except OSError:
                continue
            kept.append(stranger)
            print("connected", flush=True)
    for stranger in kept[:-500]:
        stranger.close()
    kept = kept[-500:]
    time.sleep(0.001)
"""


@contextmanager
def strangers(connect: bool = True) -> Iterator[list[str]]:
    """Runs strangers meanwhile. Yields a line for each connection that they have made so far.

    Args:
        connect: ``False``: they look for ports and connect to none, which takes the same part of the processor.
    """
    arguments = [] if connect else ["look"]
    process = subprocess.Popen([sys.executable, "-c", STRANGER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    process.stdout.readline()
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    try:
        yield lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
