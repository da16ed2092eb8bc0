"""A daemon of its own process whose folder goes, which stands still, or whose disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from psutil import STATUS_STOPPED, Process
from waiting import LONG_S, soon, until

from edl_hvd.cli.main import commands
from edl_hvd.driver.job_folder import requests
from edl_hvd.fleet.messages import is_served
from edl_hvd.fleet.store import FILE


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
        until(holds, lambda: None if self.process.poll() is None else self.log.read_text())

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


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(Process(pid).status() == STATUS_STOPPED for pid in pids))
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_daemon_whose_folder_goes_ends_with_one_line(how: str, daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    state = tmp_path / "fleet"
    served = daemon(state)
    assert served.ask("submit", "--name", "one", "--", "sleep", "60").exit_code == 0
    status = state / "jobs" / "one" / "status.json"
    served.until(lambda: status.exists() and bool(json.loads(status.read_text())["workers"]))
    before = served.said()
    pid = int(
        next(line for line in served.ask("list", "--json").stdout.splitlines() if '"pid"' in line).split()[1][:-1]
    )
    try:
        if how == "removed":
            with stopped(served.process.pid, pid):  # or a file that they write meanwhile keeps the folder
                shutil.rmtree(state)
        elif how == "moved":
            state.rename(tmp_path / "old")
        else:
            (state / "new").write_bytes((state / FILE).read_bytes())
            (state / "new").rename(state / FILE)
        assert soon(served.process) == 1
        [line] = served.said()[len(before) :]
        assert line == (
            f"error: {state / FILE} was removed or replaced while the daemon used it; expected the file to stay; put "
            f"it back and start the daemon again, or end the jobs that go on (one: kill {pid})"
        )
        os.kill(pid, 0)
        asked = served.ask("list")
        assert (asked.exit_code, asked.stdout, asked.stderr.count("\n")) == (1, "", 1)
        if how != "replaced":
            assert not state.exists(), "the daemon has not made another folder"
            assert f"there is no folder {state}; expected the --state folder" in asked.stderr
    finally:
        os.kill(pid, signal.SIGTERM)


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


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda path: path.write_text("localhost:2\n?? what\n"), "line 2"),
        (lambda path: path.write_text("\x1b[2J\n"), "line 1"),
        (lambda path: path.unlink(), "cannot read the hosts file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot read the hosts file"),
    ],
    ids=["garbage", "control", "removed", "folder"],
)
def test_a_source_of_hosts_that_fails_is_a_line_of_the_list(
    break_it: Callable[[Path], object], problem: str, daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    served = daemon(tmp_path / "fleet", "--discover", f"file:{hosts}")
    served.until(lambda: served.ask("list").stdout == "1 host, 2 of 2 slots free\n")
    break_it(hosts)
    served.until(lambda: served.ask("list").stdout.count("\n") == 2)
    first, second = served.ask("list").stdout.splitlines()
    assert first == "1 host, 2 of 2 slots free", "those known before"
    shown = re.fullmatch(r"hosts as they were known before (\d\d:\d\d:\d\d) \((\d+ s) ago\): (.*)", second)
    assert shown is not None, second
    assert problem in shown[3]
    assert str(hosts) in shown[3]
    assert second.isprintable()
    view = json.loads(served.ask("list", "--json").stdout)
    assert problem in view["trouble"]["problem"]
    assert 0 <= view["trouble"]["for_s"] < LONG_S
    if hosts.is_dir():
        hosts.rmdir()
    hosts.write_text("localhost:1\n")
    served.until(lambda: served.ask("list").stdout == "1 host, 1 of 1 slot free\n")
