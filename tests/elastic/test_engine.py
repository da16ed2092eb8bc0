"""Worlds that do not form: the process goes on to the next one, as the same process."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from bare_worlds import VARIABLES, Worlds

from edl_hvd.build.edits.release import REVISION
from edl_hvd.errors import PlatformError
from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.worker.engine import mended

_SCRIPT = textwrap.dedent("""
    import os, sys, threading
    import torch
    torch.set_num_threads(1)
    from edl_hvd.key_value_store import KeyValueStore
    from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime
    from edl_hvd.world import World

    os.environ["HOROVOD_GLOO_IFACE"] = "lo"
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "30"
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    os.environ["HOROVOD_ELASTIC"] = "1"

    def start(runtime, generation, members):
        store = KeyValueStore("127.0.0.1", token="secret")
        return store, runtime.start(World.of(generation, members, 0), store.place)

    runtime = HorovodRuntime(elastic=True)
    for generation in range(1, 1 + int(sys.argv[1])):
        threading.Timer(0.05 * generation, runtime.end_world, (2 * generation, "localhost:1")).start()
        store, collectives = start(runtime, 2 * generation, ("localhost:0", "localhost:1"))
        assert collectives is None, "a world formed without its second member"
        store.close()
        store, collectives = start(runtime, 2 * generation + 1, ("localhost:0",))
        total = collectives.allreduce(torch.full((3,), 2.0), "sum", "test")
        assert total.tolist() == [2.0, 2.0, 2.0], total
        runtime.stop(broken=False)
        store.close()
    print("done")
""")


@pytest.mark.parametrize("worlds", [1, 5])
def test_a_member_that_never_comes_costs_a_world_and_not_the_process(worlds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(worlds)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert done.stderr.count("did not form") == worlds, done.stderr


_SETS = textwrap.dedent("""
    import psutil
    import horovod.torch as hvd
    hvd.init(process_sets=[hvd.ProcessSet([0, 2])])
    own = psutil.Process().net_connections("tcp")
    print(sorted({connection.laddr.ip for connection in own}), len(own), flush=True)
    hvd.barrier()
""")


def test_connections_of_process_sets_use_the_given_interface_too(store: KeyValueStore) -> None:
    """In the release they use the address that the host's own name means."""
    named = socket.gethostbyname(socket.gethostname())
    others = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and entry.address != named
    ]
    if not others:
        pytest.skip("this host has no interface besides the one that its name means")
    interface, address = others[0]
    ranks = []
    for rank in range(3):
        place = {"RANK": rank, "SIZE": 3, "LOCAL_RANK": rank, "LOCAL_SIZE": 3, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        variables = {
            **VARIABLES, **{f"HOROVOD_{name}": str(number) for name, number in place.items()},
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": store.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port),
            "HOROVOD_ELASTIC": "0", "HOROVOD_GLOO_IFACE": interface,
        }  # fmt: skip
        command = [sys.executable, "-c", _SETS]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=120)[0].split("] ") for rank in ranks]
    assert [addresses for addresses, _ in said] == [f"['{address}'"] * 3
    assert int(said[0][1]) > int(said[1][1])  # those of the set besides those of the world


def test_a_horovod_of_another_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mended, "REVISION", REVISION + 1)
    with pytest.raises(PlatformError, match=f"mended to revision {REVISION}, and revision {REVISION + 1} is needed"):
        mended.require()


@pytest.mark.parametrize("size", [2, 3])
def test_a_member_that_dies_while_the_world_forms_costs_the_others_a_world(size: int) -> None:
    """In the release an error while a world forms ends the process with SIGABRT, and its state with it."""
    worlds, chance = Worlds(size), random.Random(size)
    try:
        for _ in range(20):
            worlds.begin(sums=False)
            time.sleep(chance.uniform(0, 0.02))
            assert worlds.kill(chance.randrange(size)) == 0
            worlds.begin()
            worlds.formed_at()
            worlds.leave()
    finally:
        worlds.close()


@pytest.mark.parametrize("wait", ["sum", "leave"])
def test_every_wait_ends_when_a_member_is_told_to_be_gone(wait: str) -> None:
    """A member that is stopped keeps its connections open: the release waits for the Gloo timeout."""
    worlds = Worlds(3)
    try:
        for _ in range(5):
            worlds.begin()
            worlds.formed_at()
            stopped = worlds.ranks[2]
            os.kill(stopped.pid, signal.SIGSTOP)
            for rank in worlds.ranks[:2]:
                rank.tell(what=wait)  # which waits for the stopped one
            time.sleep(0.05)
            worlds.tell_gone(2)
            for rank in worlds.ranks[:2]:
                result = rank.result()
                assert result is not None
                assert result.get("broken", False) is (wait == "sum")
            worlds.replace(2)
            worlds.begin()
            worlds.formed_at()
            worlds.leave()
    finally:
        worlds.close()
