"""What the survivors are left with when a rank dies in the middle of a sum.

    python benchmarks/broken_sums.py [--ranks 4] [--numbers 3000] [--dies 0] [--trials 100]

Ranks sum numbers that everybody can tell beforehand, again and again, until one of them ends at one of its writes to a
socket, a different one in each trial. A survivor may fail, as it should; it may find garbage in a sum that has
succeeded; its Gloo may abort, which ends the process; it may not come back from Horovod within a minute. Where one had
garbage, the last lines tell how many of the others had failed in that same sum, and how often a later sum succeeded.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch

from edl_hvd.errors import WorldBrokenError
from edl_hvd.key_value_store import KeyValueStore, StoreAddress
from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime
from edl_hvd.world import World

# Gloo sends by writev, from C++: whoever is to die there needs its own.
DEADLY_WRITE = r"""
#include <dlfcn.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>
extern "C" {
volatile int writes_left = 0;
ssize_t writev(int descriptor, const struct iovec* parts, int count) {
  using Write = ssize_t (*)(int, const struct iovec*, int);
  static Write write = reinterpret_cast<Write>(dlsym(RTLD_NEXT, "writev"));
  if (writes_left > 0 && __sync_sub_and_fetch(&writes_left, 1) == 0) kill(getpid(), SIGKILL);
  return write(descriptor, parts, count);
}
}
"""
LIBRARY = "EDL_HVD_BENCHMARK_LIBRARY"
WRITES = 120
# A few sums of four ranks, with what Horovod says between them.
VARIABLES = {
    "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_HOSTNAME": "localhost", "HOROVOD_ELASTIC": "1",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="that sum (default 4)")
    parser.add_argument("--numbers", type=int, default=3000, help="that each rank adds (default 3000)")
    parser.add_argument("--dies", type=int, default=0, help="rank that dies (default 0)")
    parser.add_argument("--trials", type=int, default=100, help="deaths (default 100)")
    arguments = parser.parse_args()
    if LIBRARY not in os.environ:
        run_with_deadly_writes()
    os.environ.update(VARIABLES)
    torch.set_num_threads(1)
    tell([trial(arguments) for _ in range(arguments.trials)])


def run_with_deadly_writes() -> NoReturn:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "writes.cc"), Path(folder, "writes.so")
        source.write_text(DEADLY_WRITE)
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), LIBRARY: str(library)}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


def trial(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each survivor came to."""
    store = KeyValueStore("127.0.0.1", token="secret")
    results, pids = [], []
    for rank in range(arguments.ranks):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            be_rank(rank, arguments, store.place, theirs)
        os.close(theirs)
        pids.append(pid)
        results.append(ours)
    survivors = []
    for rank, ours in enumerate(results):
        with open(ours, encoding="utf-8") as lines:
            survivors += [json.loads(line) for line in lines if rank != arguments.dies]
    for pid in pids:
        os.waitpid(pid, 0)
    store.close()
    return survivors


def be_rank(rank: int, arguments: argparse.Namespace, store: StoreAddress, output: int) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Gloo says as it fails
    members = tuple(f"localhost:{slot}" for slot in range(arguments.ranks))
    came_to: dict[str, Any] = {"how": "failed", "sums": 0, "garbage": None}

    def end(how: str) -> NoReturn:
        os.write(output, json.dumps({**came_to, "how": how}).encode() + b"\n")
        os._exit(0)

    runtime = HorovodRuntime(elastic=True)
    collectives = runtime.start(World.of(1, members, rank), store)
    assert collectives is not None
    if rank == arguments.dies:
        library = ctypes.CDLL(os.environ[LIBRARY])
        ctypes.c_int.in_dll(library, "writes_left").value = random.SystemRandom().randint(1, WRITES)
    try:
        while True:
            number = came_to["sums"] % 1000
            tensor = torch.full((arguments.numbers,), float(rank + number))
            collectives.finish([collectives.start_sum(tensor, "sum", 1.0)])
            right = arguments.ranks * (arguments.ranks - 1) / 2 + arguments.ranks * number
            if came_to["garbage"] is None and not bool((tensor == right).all()):
                came_to["garbage"] = came_to["sums"]
            came_to["sums"] += 1
    except WorldBrokenError:
        runtime.stop(broken=True)
    end("failed")


def tell(trials: list[list[dict[str, Any]]]) -> None:
    ways: collections.Counter[str] = collections.Counter()
    in_the_same, others, later = 0, 0, 0
    for survivors in trials:
        for survivor in survivors:
            garbage = survivor["garbage"]
            ways[survivor["how"] if garbage is None else "garbage"] += 1
            if garbage is not None:
                rest = [other for other in survivors if other is not survivor]
                in_the_same += sum(other["sums"] == garbage for other in rest)
                others += len(rest)
                later += survivor["sums"] > garbage + 1
    print(f"{len(trials)} deaths; survivors that")
    print(f"  failed, as they should              {ways['failed']:>6}")
    print(f"  did not come back from Horovod      {ways['stuck']:>6}")
    print(f"  aborted                             {ways['aborted']:>6}")
    print(f"  had garbage in a sum, and no error  {ways['garbage']:>6}")
    print(f"    others that failed in that sum    {in_the_same:>6} of {others}")
    print(f"    after which a later sum succeeded {later:>6}")


if __name__ == "__main__":
    main()
