"""A process whose connections threads of the mended Horovod hold, beside one of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile

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
own.sendall(f"holds {sum(held)}\\n".encode())
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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            words = [sys.executable, "-c", WORKER, str(listener.getsockname()[1]), str(megabytes)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = subprocess.Popen(words, env=environment, stderr=self._stderr)
            self.own, *self.watches = [listener.accept()[0] for _ in range(3)]
        said = self.own.recv(16)
        if said != b"holds 2\n":
            ended = "it goes on" if said else f"it ended with {self.process.wait()}"
            self._stderr.seek(0)
            errors = self._stderr.read().decode()
            self.close()
            raise RuntimeError(f"the process says {said!r}, and {ended}; its errors: {errors or 'none'}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stderr.close()
        for connection in (self.own, *self.watches):
            connection.close()
