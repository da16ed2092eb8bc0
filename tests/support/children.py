"""Starting workers from tests: what they write, whether somebody still lives, and an ssh that only pretends."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.process import Exit
from edl_hvd.driver.workers.ssh import Ssh

WORKER = "b:0"
Result = TypeVar("Result")
_LONG_S = 300.0

# What sshd does with a command: a shell runs it in a session of its own, which the driver has made already.
PRETENDED_SSH = """\
#!/bin/sh
for command; do :; done
{before}
PATH={folder}:$PATH exec sh -c "$command"
"""


def pretend_ssh(folder: Path, shell: str, before: str = "") -> Path:
    """Makes a folder for ``PATH`` whose ``ssh`` runs the command on this machine, where ``sh`` is that shell."""
    found = shutil.which(shell)
    assert found is not None
    folder.mkdir()
    (folder / "sh").symlink_to(found)
    (folder / "ssh").write_text(PRETENDED_SSH.format(folder=folder, before=before))
    (folder / "ssh").chmod(0o755)
    return folder


class CollectedOutput:
    """Keeps what workers print."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, bytes]] = []
        self._more = asyncio.Event()

    def take(self, worker: str, stream: str, line: bytes) -> None:
        self.heard.append((worker, stream, line))
        self._more.set()

    def text(self, stream: str = "stdout") -> bytes:
        return b"".join(line for _, heard_on, line in self.heard if heard_on == stream)

    async def number(self, name: str) -> int:
        """The number in the line ``name number``, once it has been written."""
        while True:
            for _, _, line in self.heard:
                words = line.split()
                if len(words) == 2 and words[0] == name.encode():
                    return int(words[1])
            self._more.clear()
            await self._more.wait()


def launcher(
    words: tuple[str, ...],
    output: CollectedOutput,
    local: bool,
    environment: dict[str, str] | None = None,
    folder: Path | str = "/",
    ssh: Ssh | None = None,
) -> Launcher:
    environment = {"PATH": os.environ["PATH"]} if environment is None else environment
    return Launcher(Program(words, environment, str(folder)), ssh or Ssh(), lambda host: local, output.take)


def python(code: str) -> tuple[str, ...]:
    """The command that runs it."""
    return (sys.executable, "-c", code)


def shell(code: str) -> tuple[str, ...]:
    return ("sh", "-c", code)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(_bounded(test()))


async def _bounded(work: Coroutine[Any, Any, Result]) -> Result:
    """As ``soon`` in ``tests/support/waiting.py``, which programs that import this module cannot import."""
    return await asyncio.wait_for(work, _LONG_S)


async def gone(process: int) -> None:
    """Return once that process, of whomever, has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


def lives(process: int) -> bool:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return False
    ended, _, _ = select.select([descriptor], [], [], 0)
    os.close(descriptor)
    return not ended


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def command_lines() -> bytes:
    """Of every process on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found.append((folder / "cmdline").read_bytes())
            except OSError:  # It ended meanwhile.
                continue
    return b"\n".join(found)


def outcome_of(words: tuple[str, ...], local: bool, **options) -> tuple[Exit, CollectedOutput, list[str]]:
    """Run a worker to its end."""
    output = CollectedOutput()

    async def follow():
        process = await launcher(words, output, local, **options).start(WORKER, {})
        return await process.wait(), process.last_lines

    exit_, last_lines = asyncio.run(_bounded(follow()))
    return exit_, output, last_lines
