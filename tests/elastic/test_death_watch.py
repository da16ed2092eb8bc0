"""A killed worker is missed before its memory has been freed, by connections that threads of Horovod's hold."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import kill
from harness import Outcome
from training import Training
from watched_process import Watched

TRIES = 20


@pytest.fixture
def watched() -> Iterator[Callable[..., Watched]]:
    all_: list[Watched] = []

    def start(megabytes: int = 1) -> Watched:
        all_.append(Watched(megabytes))
        return all_[-1]

    yield start
    for one in all_:
        one.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_killed_process_is_missed_while_its_own_connections_are_still_open(watched):
    # One of the two watches may be held by the last thread, so the first to end counts; and who looks may come late.
    for _ in range(TRIES):
        one = watched(megabytes=500)
        one.process.kill()
        first = wait_for_one(one.watches)
        assert first.recv(1) == b"", "nothing is said"
        if is_open(one.own):
            return
        one.close()
    pytest.fail(f"in {TRIES} tries its own connection ended as early")


def wait_for_one(connections: list[socket.socket]) -> socket.socket:
    readable, _, _ = select.select(connections, [], [])
    return readable[0]


@pytest.mark.parametrize(("how", "said"), [(b"end", b"\n"), (b"exit", b""), (b"crash", b"")])
def test_only_a_process_that_ends_in_order_says_so(watched, how, said):
    one = watched()
    one.own.sendall(how)
    assert [watch.recv(16) for watch in one.watches] == [said, said]
    assert [watch.recv(16) for watch in one.watches] == [b"", b""]


def test_each_is_held_by_a_thread_that_has_nothing_else_open(watched):
    one = watched()
    tasks = Path(f"/proc/{one.process.pid}/task")
    tables = {task.name: {os.readlink(entry) for entry in (task / "fd").iterdir()} for task in tasks.iterdir()}
    own = tables.pop(str(one.process.pid))
    alone = [table for table in tables.values() if table != own]
    assert len(alone) == 2
    for table in alone:
        assert len(table) == 2
        (connection,) = (name for name in table if name.startswith("socket:"))
        assert connection not in own, "a data loader's process would keep it open"


def test_a_signal_of_the_process_is_not_taken_by_these_threads(watched):
    one = watched()
    masks = [
        int(line.split()[1], 16)
        for task in Path(f"/proc/{one.process.pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("SigBlk:")
    ]
    blocking = [mask for mask in masks if mask >> (signal.SIGTERM - 1) & 1]
    assert len(blocking) >= 2


def test_a_job_goes_on_when_the_process_begins_to_end(edlrun: Callable[..., Outcome], tmp_path: Path) -> None:
    folder = tmp_path / "job-dir"
    kills = [kill(rank=1, step=step) for step in (5, 9, 13)]
    flags = ("--job-dir", str(folder), "--host-failures", "10")
    outcome = edlrun(("localhost:2",), *kills, training=Training(ballast_mb=200), flags=flags)
    happened = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    order = [(line["what"], line["incarnation"]) for line in happened if line.get("what") in ("Exiting", "Exited")]
    # A driver that comes late to look sees both.
    assert any(order.index(("Exiting", n)) < order.index(("Exited", n)) for what, n in order if what == "Exiting"), (
        order
    )
    assert outcome.output.count("lost (killed by SIGKILL)") >= 1
