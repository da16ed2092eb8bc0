"""Processes of the same hosts that connect to whatever listens, while worlds form."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from bare_worlds import Worlds, strangers

from edl_hvd import key_value_store
from edl_hvd.key_value_store import StoreAddress

STORE = """
import sys
from edl_hvd.key_value_store import KeyValueStore

print(KeyValueStore("127.0.0.1", token="secret").port, flush=True)
sys.stdin.read()
"""
MIB = 1 << 20


@pytest.mark.parametrize("size", [2, 3])
def test_every_world_forms_beside_strangers(size: int) -> None:
    """In the release the first who connects is taken for the member that is expected, and the world never forms."""
    worlds = Worlds(size)
    try:
        with strangers() as connections:
            # On a busy machine a stranger comes too late for many a world.
            for formed in range(2000):
                if formed >= 20 and len(connections) > 20:
                    break
                worlds.begin()
                worlds.formed_at()
                worlds.leave()
        assert len(connections) > 20
    finally:
        worlds.close()


def test_a_flood_of_the_store_by_strangers_takes_no_memory() -> None:
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        place = StoreAddress("127.0.0.1", int(server.stdout.readline()))
        before = psutil.Process(server.pid).memory_info().rss
        for number in range(300):
            with pytest.raises(OSError, match="status 401"):
                key_value_store.put(place, f"/global/{number}", bytes(MIB), timeout_s=10)
        assert psutil.Process(server.pid).memory_info().rss - before < 10 * MIB
        server.stdin.close()
