"""A process whose connections threads of the mended Horovod hold, beside one of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

WORKER = """
import os, socket, sys
import torch
from edl_hvd.worker.engine import mended

place = ("127.0.0.1", int(sys.argv[1]))
own = socket.create_connection(place)
held = []
for _ in range(2):
    watch = socket.create_connection(place)
    held.append(mended.watch_death(watch.fileno()))
    watch.close()
ballast = torch.ones(int(sys.argv[2]) * 250_000)
own.sendall(b"ready\\n" if all(held) else b"nothing is held\\n")
what = own.recv(16)
if what == b"end":
    mended.end_death_watch()
elif what == b"exit":
    os._exit(0)
elif what == b"crash":
    os.abort()
"""


class Watched:
    """A process with a connection of its own and two that are held."""

    def __init__(self, megabytes: int = 1) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            words = [sys.executable, "-c", WORKER, str(listener.getsockname()[1]), str(megabytes)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            self.own, *self.watches = [listener.accept()[0] for _ in range(3)]
        assert self.own.recv(16) == b"ready\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for connection in (self.own, *self.watches):
            connection.close()
