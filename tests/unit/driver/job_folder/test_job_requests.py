"""What other terminals ask of a job and are told: the socket in its folder, the commands ``drain`` and ``status``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import random
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from job_folders import COMMAND, claimed, everything, leave, options, status
from waiting import soon

from edl_hvd.cli.main import commands
from edl_hvd.driver.job_folder.claim import JobFolder, claim
from edl_hvd.driver.job_folder.files import CONTROL
from edl_hvd.driver.job_folder.requests import LONGEST_LINE_BYTES, Requests, answer, ask
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import Membership, Rules, begin
from edl_hvd.driver.membership.transition import transition
from edl_hvd.errors import PlatformError
from edl_hvd.hosts import HostSlots


def training(*entries: str, least: int = 1) -> Membership:
    """A job whose workers on these hosts train."""
    hosts = tuple(HostSlots(entry[0], int(entry[2])) for entry in entries)
    membership = begin(Rules(sum(host.slots for host in hosts), least, 9, last_call_timeout_s=0.0), 0.0)
    membership, _ = transition(membership, events.HostsFound(hosts), 0.0)
    for kind in (lambda w: events.Ready(w, 1), lambda w: events.Formed(w, 1, 1)):
        for worker in list(membership.slots):
            membership, _ = transition(membership, kind(worker), 1.0)
    assert membership.world.phase == "running"
    return membership


def drain(target: object, notice_s: object = 60) -> bytes:
    return json.dumps({"what": "drain", "target": target, "notice_s": notice_s}).encode()


@pytest.mark.parametrize(
    ("target", "leaving", "stay"), [("b", ["b:0", "b:1"], 1), ("b:1", ["b:1"], 2), ("a", ["a:0"], 2)]
)
def test_a_host_or_worker_of_the_job_is_left(target, leaving, stay):
    membership = training("a:1", "b:2")
    said = answer(drain(target), membership, 1.0)
    assert said.event == events.DrainRequested(target, 60.0)
    assert said.fields == {"ok": True, "workers": leaving, "stay": stay, "slots": stay, "least": 1}


def test_who_leaves_already_does_not_count_as_staying():
    membership, _ = transition(training("a:1", "b:2"), events.DrainRequested("b:0", 60.0), 2.0)
    assert answer(drain("a"), membership, 2.0).fields["stay"] == 1


@pytest.mark.parametrize("target", ["c", "b:2", "a:1", "", "b:", ":0", "b:0:0", " b", "B", None, 7, ["b"], {"b": 0}])
def test_what_the_job_has_not_is_answered_with_the_hosts_there_are(target):
    said = answer(drain(target), training("a:1", "b:2"), 1.0)
    assert said.event is None
    assert said.fields["hosts"] == ["a", "b"]
    assert said.fields["problem"].endswith("its hosts are a, b")


@pytest.mark.parametrize("notice", [-1, 86_401, None, "60", True, float("inf"), float("nan"), 10**400, [60]])
def test_a_notice_that_is_no_time_changes_nothing(notice):
    said = answer(drain("b", notice), training("b:1"), 1.0)
    assert (said.event, said.fields["ok"]) == (None, False)


class Listening:
    """A job's side of its socket, in a thread of its own."""

    def __init__(self, folder: Path, membership: Membership) -> None:
        self.heard: list[events.DrainRequested] = []
        self.membership = membership
        self.loop = asyncio.new_event_loop()
        self.requests = Requests(self.take)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.requests.start(folder), self.loop).result(30)

    def take(self, line: bytes):
        said = answer(line, self.membership, 1.0)
        if said.event is not None:
            self.heard.append(said.event)
        return said.fields

    def close(self) -> None:
        async def end() -> None:
            self.requests.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait({task}, timeout=30)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


@pytest.fixture
def job_folder(runtime, tmp_path) -> Iterator[JobFolder]:
    # Longer than an address of a socket may be.
    with claim(options(tmp_path / ("long" * 30) / "job")) as folder:
        yield folder


@pytest.fixture
def listening(job_folder) -> Iterator[Listening]:
    listening = Listening(job_folder.path, training("a:1", "b:2"))
    yield listening
    listening.close()


def test_the_socket_is_for_this_user_alone_and_its_folder_may_have_a_long_name(job_folder, listening):
    assert len(str(job_folder.path / CONTROL)) > 108
    mode = (job_folder.path / CONTROL).stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    said = ask(job_folder.path, {"what": "drain", "target": "b:0", "notice_s": 5})
    assert said["ok"]
    assert listening.heard == [events.DrainRequested("b:0", 5.0)]


def test_a_socket_that_a_killed_edlrun_has_left_is_in_nobodys_way(job_folder):
    (job_folder.path / CONTROL).touch()
    listening = Listening(job_folder.path, training("a:1"))
    assert ask(job_folder.path, {"what": "drain", "target": "a", "notice_s": 5})["ok"]
    listening.close()


def test_nobody_there_is_one_error(job_folder):
    with pytest.raises(PlatformError, match=r"which did not answer: .*No such file"):
        ask(job_folder.path, {})


@pytest.mark.parametrize("said", [b"", b'{"ok": tr'])
def test_an_answer_that_is_not_whole_says_that_the_request_may_have_been_done(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(CONTROL)
        listening.listen()

        def end_while_answering() -> None:
            caller, _ = listening.accept()
            with caller, caller.makefile("rb") as lines:
                lines.readline()
                caller.sendall(said)

        ending = threading.Thread(target=end_while_answering)
        ending.start()
        with pytest.raises(PlatformError) as raised:
            ask(tmp_path, {"what": "drain"}, "the daemon", "expected one that runs")
        soon(ending)
    assert str(raised.value) == (
        f"asked the daemon of {tmp_path}, which ended before its answer was whole, so what was asked for may have been "
        "done; look before you ask again; expected one that runs"
    )


def connect(path: Path) -> socket.socket:
    os.chdir(path)  # the other way around the length of an address
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(CONTROL)
    connection.settimeout(30)
    return connection


def test_nonsense_is_answered_and_changes_nothing(job_folder, listening, monkeypatch):
    monkeypatch.chdir(job_folder.path)
    chance = random.Random(0)
    whole = drain("b:0")
    for number in range(3000):
        line = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            kind = chance.randrange(4)
            if kind == 0:
                line[chance.randrange(len(line))] = chance.randrange(256)
            elif kind == 1:
                del line[chance.randrange(len(line)) :]
                line += b" "
            elif kind == 2:
                line += bytes(chance.randrange(256) for _ in range(chance.randrange(60)))
            else:
                line = bytearray(json.dumps(chance.choice([None, [], {}, 7, "drain", {"what": "drain"}])).encode())
        with connect(job_folder.path) as caller:
            caller.sendall(bytes(line).replace(b"\n", b"") + chance.choice((b"", b"\n")))
            caller.shutdown(socket.SHUT_WR)
            said = json.loads(caller.makefile("rb").readline())
        assert isinstance(said["ok"], bool), number
    # What was asked for nevertheless was spelt right.
    assert {asked.target for asked in listening.heard} <= {"a", "b", "a:0", "b:0", "b:1"}
    assert ask(job_folder.path, {"what": "drain", "target": "a", "notice_s": 5})["ok"]


def test_who_talks_without_end_or_hangs_up_disturbs_nobody(job_folder, listening, monkeypatch):
    monkeypatch.chdir(job_folder.path)
    with connect(job_folder.path) as endless, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        endless.sendall(b"x" * 100 * LONGEST_LINE_BYTES)
    for _ in range(100):
        connect(job_folder.path).close()
    silent = [connect(job_folder.path) for _ in range(10)]
    assert ask(job_folder.path, {"what": "drain", "target": "a", "notice_s": 5})["ok"]
    for caller in silent:
        caller.close()


def test_all_are_answered_who_come_at_once_while_the_process_is_busy(job_folder, listening):
    listening.loop.call_soon_threadsafe(time.sleep, 1.0)
    with ThreadPoolExecutor(100) as callers:
        asked = [callers.submit(ask, job_folder.path, {"what": "nothing"}) for _ in range(100)]
        assert [soon(one)["ok"] for one in asked] == [False] * 100


# --- the commands ---


def run(*words: str):
    return CliRunner().invoke(commands, words)


def test_drain_says_what_follows(job_folder, listening):
    path = str(job_folder.path)
    done = run("drain", "b:0", "--job", path, "--notice", "30")
    assert (done.exit_code, done.stdout) == (0, "1 worker leaves b:0 at the next commit; 2 workers stay\n")
    assert run("drain", "b", "--job", path).stdout == "2 workers leave b at the next commit; 1 worker stays\n"
    assert listening.heard == [events.DrainRequested("b:0", 30.0), events.DrainRequested("b", 120.0)]
    listening.membership = training("a:1", "b:2", least=2)
    waits = run("drain", "b", "--job", path).stdout
    assert waits.endswith("; 1 worker of the 2 that --min-np asks for stay, so the job waits for more\n")
    listening.membership = training("b:2")
    assert "the job saves a checkpoint and ends with exit code 75" in run("drain", "b", "--job", path).stdout


def test_drain_refuses_in_one_line(job_folder, listening, tmp_path):
    done = run("drain", "node-9", "--job", str(job_folder.path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: the job has no host or worker 'node-9'; its hosts are a, b\n"
    done = run("drain", "a", "--job", str(tmp_path))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    leave(tmp_path / "over", status("ended", end=events.End(0)))
    done = run("drain", "a", "--job", str(tmp_path / "over"))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "is not running" in done.stderr
    done = run("drain", "a")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), "there is no terminal on which to ask"
    assert done.stderr.startswith("error: cannot drain a: no job was named, and standard input is no terminal ")
    assert listening.heard == []


@pytest.fixture
def at_a_terminal(monkeypatch, capsys) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs ``edl-hvd`` on a terminal on which this is typed; its exit code, output and errors."""
    with contextlib.ExitStack() as open_files:

        def run(typed: str, *words: str) -> tuple[int, str, str]:
            main, other = pty.openpty()
            open_files.callback(os.close, main)
            monkeypatch.setattr(sys, "stdin", open_files.enter_context(open(other)))
            os.write(main, typed.encode())
            with pytest.raises(SystemExit) as ended:
                commands(words)
            return int(ended.value.code or 0), *capsys.readouterr()

        yield run


def test_without_a_job_drain_asks_whether_the_only_one_is_meant(job_folder, listening, at_a_terminal):
    code, out, err = at_a_terminal("y\n", "drain", "b")
    assert (code, out) == (0, "2 workers leave b at the next commit; 1 worker stays\n")
    assert err.startswith(f"Drain b of the job {job_folder.path} (python train.py --name 'two words')? [y/N]")
    assert listening.heard == [events.DrainRequested("b", 120.0)]


@pytest.mark.parametrize("typed", ["\n", "n\n", "no\n"])
def test_without_a_yes_nothing_is_drained(job_folder, listening, at_a_terminal, typed):
    code, out, err = at_a_terminal(typed, "drain", "b")
    assert (code, out) == (1, "")
    assert err.endswith("error: b is not drained; name another job with --job\n")
    assert listening.heard == []


def test_of_several_jobs_drain_asks_for_the_name_of_one(job_folder, listening, at_a_terminal, tmp_path):
    with claim(options(tmp_path / "second")):
        code, _, err = at_a_terminal("y\n", "drain", "a")
    assert code == 2
    assert err.startswith("error: 2 jobs run; name one with --job: ")
    assert listening.heard == []


def test_status_shows_the_only_job_or_a_list_of_them(runtime, tmp_path):
    done = run("status")
    assert (done.exit_code, done.stderr) == (
        1, "error: no job of this user runs on this machine; for a job that has ended give its folder as JOB_DIR\n",
    )  # fmt: skip
    with claimed(tmp_path / "one") as folder:
        folder.write_status(everything())
        only = run("status")
        assert only.exit_code == 0
        for words in ("training", "generation 3", "step        12", "two words", " s ago", "down, starts in 4 s"):
            assert words in only.stdout, only.stdout
        assert only.stdout.splitlines()[:2] == run("status", str(tmp_path / "one")).stdout.splitlines()[:2]
        with claim(options()):
            both = run("status")
            assert both.stdout.startswith("job ")
            assert len(json.loads(run("status", "--json").stdout)) == 2
    dead = run("status", str(tmp_path / "one"))
    assert (dead.exit_code, "dead" in dead.stdout) == (0, True)
    assert run("status", str(tmp_path / "none")).exit_code == 1


def test_status_as_json_is_what_the_files_hold(runtime, tmp_path):
    with claimed(tmp_path) as folder:
        folder.write_status(everything())
        shown = json.loads(run("status", str(tmp_path), "--json").stdout)
    assert (shown["folder"], shown["running"], shown["dead"]) == (str(tmp_path), True, False)
    assert shown["job"]["command"] == list(COMMAND)
    assert shown["status"]["workers"][0]["phase"] == "compute"


def test_a_status_that_is_watched_ends_with_its_job(runtime, tmp_path):
    leave(tmp_path, status("ended", 9, end=events.End(75, "every host is left")))
    done = run("status", str(tmp_path), "--watch")
    assert (done.exit_code, "ended with exit code 75" in done.stdout) == (0, True)
    done = run("status", str(tmp_path), "--watch", "--json")
    assert json.loads(done.stdout)["status"]["end"]["code"] == 75
