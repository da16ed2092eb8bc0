"""Worlds that do not form: the process goes on to the next one, as the same process."""

import subprocess
import sys
import textwrap

import pytest

_SCRIPT = textwrap.dedent("""
    import os, sys, threading, time
    import torch
    torch.set_num_threads(1)
    from edl_hvd.key_value_store import KeyValueStore
    from edl_hvd.worker.engine.departures import Departures
    from edl_hvd.worker.engine.engine import Engine
    from edl_hvd.world import World

    os.environ["HOROVOD_GLOO_IFACE"] = "lo"
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "30"
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    os.environ["HOROVOD_ELASTIC"] = "1"

    def forms(engine, generation, members, departures):
        store = KeyValueStore("127.0.0.1")
        world = World.of(generation, members, 0)
        return store, engine.start(world, (store.address, store.port), departures)

    engine = Engine("localhost:0", dict(os.environ), elastic=True)
    begin_s = time.monotonic()
    for generation in range(1, 1 + int(sys.argv[1])):
        departures = Departures()
        threading.Timer(0.05 * generation, departures.note, ("localhost:1",), {"regular": False}).start()
        store, collectives = forms(engine, generation, ("localhost:0", "localhost:1"), departures)
        assert collectives is None, "a world formed without its second member"
        store.close()
        store, collectives = forms(engine, 100 + generation, ("localhost:0",), Departures())
        total = collectives.allreduce(torch.full((3,), 2.0), "sum", "test")
        assert total.tolist() == [2.0, 2.0, 2.0], total
        engine.stop(broken=False)
        store.close()
    print("pid", os.getpid(), "took", round(time.monotonic() - begin_s, 2))
""")


@pytest.mark.parametrize("worlds", [1, 5])
def test_a_member_that_never_comes_costs_a_world_and_not_the_process(worlds: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(worlds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"pid {process.pid} " in out  # the process was not run anew: it would have begun with a past life
    assert err.count("did not form") == worlds, err
    assert "running this process anew" not in err
