"""Jobs whose driver and workers come from one process that has imported torch, made for all tests of this process."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

from preloaded_edlrun import NO_TOKEN, TOKEN, Start, fork_by

PRELOADED_EDLRUN = [sys.executable, str(Path(__file__).resolve().with_name("preloaded_edlrun.py"))]
HANGS_S = 180.0  # many times what a job takes; only ends a test that would hang


class Child:
    """A child of this process; what the tests use of a ``subprocess.Popen``.

    Attributes:
        pid: Its number.
        returncode: Its exit code, negative for a signal; ``None`` until somebody has seen that it has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._one_at_a_time = threading.Lock()

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def ends_within(self, limit_s: float) -> bool:
        """Wait for so long at most; whether it has ended."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            select.select([descriptor], [], [], limit_s)
            os.close(descriptor)
        return self.poll() is not None

    def _look(self, how: int) -> int | None:
        with self._one_at_a_time:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, how)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


class _Forker:
    """The process that has made the imports.

    Args:
        modules: What it imports; if empty, what the workers of jobs need.
    """

    def __init__(self, *modules: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        repository = str(Path(__file__).parents[2])
        variables = {**os.environ, TOKEN: NO_TOKEN, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [*PRELOADED_EDLRUN, "--prepare", str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=variables,
        )  # fmt: skip
        theirs.close()
        assert self._line.recv(16) == b"ready"
        self._one_at_a_time = threading.Lock()
        atexit.register(self.close)

    def start(self, start: Start, output: BinaryIO) -> Child:
        with self._one_at_a_time:
            return Child(fork_by(self._line, start, [output.fileno(), output.fileno()]))

    def close(self) -> None:
        self._line.close()
        self._process.wait()


_forker = cache(_Forker)


def start(words: list[str], environment: Mapping[str, str], folder: Path, output: BinaryIO) -> Child:
    """Start a job of ``PRELOADED_EDLRUN``, or a script, as a leader of a session that ends with this process.

    Args:
        words: The program: ``PRELOADED_EDLRUN`` and its arguments, or Python, a script and its arguments.
        environment: All its variables. Those that torch reads while it is imported have no effect on the workers.
        folder: Where it runs.
        output: Takes what it writes, to standard error, too.
    """
    return _forker().start(Start(tuple(words), dict(environment), str(folder)), output)


def run(words: list[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """The exit code, and all that was written; see ``start``. Kills what hangs, and shows what it has written."""
    return _outcome(_forker(), Start(tuple(words), dict(environment), str(folder)))


def run_code(code: str, *modules: str) -> tuple[int, str]:
    """The same of ``python -c`` with this code, in a process that has imported these modules and nothing else."""
    return _outcome(_forker(*modules), Start((sys.executable, "-c", code), dict(os.environ), os.getcwd()))


def _outcome(forker: _Forker, start: Start) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = forker.start(start, output)
        try:
            has_ended = child.ends_within(HANGS_S)
        finally:
            child.send_signal(signal.SIGKILL)
        code = child.wait()
        output.seek(0)
        text = output.read().decode()
    assert has_ended, f"it did not end within {HANGS_S:g} s; all that it wrote:\n{text}"
    return code, text
