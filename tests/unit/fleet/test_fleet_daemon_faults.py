"""A daemon of its own process that is not well: what commands and the daemon say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from waiting import LONG_S, soon

from edl_hvd.cli.main import commands
from edl_hvd.driver.job_folder import requests
from edl_hvd.fleet.messages import is_served


class Daemon:
    """The process of a daemon, and what it has printed."""

    def __init__(self, state: Path, log: Path, *flags: str) -> None:
        self.state, self.log = state, log
        words = ["-m", "edl_hvd.cli.main", "fleet", "serve", *(flags or ("-H", "localhost:2")), "--state", str(state)]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self.until(lambda: is_served(state))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LONG_S
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.02)

    def said(self) -> list[str]:
        """The lines that it has printed, without the first, which says where it serves."""
        return self.log.read_text().splitlines()[1:]

    def ask(self, *words: str) -> Result:
        split = words.index("--") if "--" in words else len(words)
        return CliRunner().invoke(
            commands, ["fleet", *words[:split], "--state", str(self.state), *words[split:]]
        )  # fmt: skip


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon whose state is in the given folder; no process of it stays."""
    started: list[Daemon] = []

    def start(state: Path, *flags: str) -> Daemon:
        started.append(Daemon(state, tmp_path / f"daemon{len(started)}.log", *flags))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        soon(one.process)


def test_a_daemon_that_stands_still_is_named_by_its_process(
    daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = daemon(tmp_path / "fleet")
    pid = served.process.pid
    monkeypatch.setattr(requests, "_ANSWER_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    for words in (("list",), ("submit", "--name", "one", "--", "true"), ("claim", "web", "--slots", "1")):
        asked = served.ask(*words)
        assert (asked.exit_code, asked.stdout) == (1, "")
        assert asked.stderr.startswith(
            f"error: asked the daemon of {tmp_path / 'fleet'}, process {pid}, which has not answered within 0.5 s: it "
            f"was stopped (SIGSTOP, or a debugger); let it go on with 'kill -CONT {pid}', and look before you ask "
            "again: what was asked for may be done then"
        )
        assert "start it with" not in asked.stderr
        assert asked.stderr.count("\n") == 1
    os.kill(pid, signal.SIGCONT)
    served.until(lambda: served.ask("list").exit_code == 0)


def test_a_daemon_that_is_busy_is_named_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        monkeypatch.setattr(requests, "_ANSWER_S", 0.1)
        asked = CliRunner().invoke(commands, ["fleet", "list", "--state", str(tmp_path)])
    assert (asked.exit_code, asked.stdout) == (1, "")
    assert asked.stderr == (
        f"error: asked the daemon of {tmp_path}, process {os.getpid()}, which has not answered within 0.1 s: it is "
        f"busy or hangs; look at it with 'ps -p {os.getpid()} -o stat,time,args', and look before you ask again: what "
        "was asked for may be done later\n"
    )
