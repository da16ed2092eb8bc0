"""Worlds that do not form: the process goes on to the next one, as the same process."""

import subprocess
import sys
import textwrap

import pytest

from edl_hvd.build.engine_edits import REVISION
from edl_hvd.errors import PlatformError
from edl_hvd.worker.engine import mended

_SCRIPT = textwrap.dedent("""
    import os, sys, threading
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
    print("done")
""")


@pytest.mark.parametrize("worlds", [1, 5])
def test_a_member_that_never_comes_costs_a_world_and_not_the_process(worlds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(worlds)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert done.stderr.count("did not form") == worlds, done.stderr
    assert "running this process anew" not in done.stderr


def test_a_horovod_of_another_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mended, "REVISION", REVISION + 1)
    with pytest.raises(PlatformError, match=f"mended to revision {REVISION}, and revision {REVISION + 1} is needed"):
        mended.require()
