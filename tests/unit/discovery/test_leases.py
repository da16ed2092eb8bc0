"""Leases: who counts, when, and what no clock is asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from clocks import FakeClock
from thread_signals import signal_another_thread
from waiting import until

from edl_hvd.discovery.leasing import HeldHostLease
from edl_hvd.discovery.registry import make_source
from edl_hvd.discovery.sources.combined import read_source
from edl_hvd.discovery.sources.leases import Leases
from edl_hvd.errors import DiscoveryError, StorageError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.storage.file import FileStorage

A, B, C = HostSlots("node-a", 1), HostSlots("node-b", 2), HostSlots("10.0.0.7", 8)


class Hosts:
    """Hosts that write when they are told to, and time that passes when somebody looks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.count = folder, FakeClock(), 0
        self.alive: set[HostSlots] = set()
        self.source = Leases(str(folder), lapse_s=9.0, clock=self)

    # The clock of the source: while it sleeps, those that live write.
    def monotonic_s(self) -> float:
        return self.clock.now_s

    def wall_s(self) -> float:
        raise AssertionError("the time of day decides nothing")

    def sleep(self, duration_s: float) -> None:
        self.clock.sleep(duration_s)
        self.write()

    def write(self, *entries: HostSlots, written_s: float | None = 1.0) -> None:
        """Leases change; their files' times say nothing, as with a clock that stands."""
        self.count += 1
        for entry in entries or tuple(self.alive):
            path = self.folder / f"{entry.host}={entry.slots}.lease"
            path.write_text(json.dumps({"holder": entry.host, "count": self.count}))
            if written_s is not None:
                os.utime(path, (written_s, written_s))

    def ask(self, passed_s: float = 0.0) -> set[HostSlots]:
        self.clock.sleep(passed_s)
        return set(self.source.answer().hosts)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_hosts_that_write_are_there_and_one_that_a_dead_host_left_is_not(hosts: Hosts) -> None:
    hosts.write(A, B, C)
    hosts.alive = {A, C}
    assert hosts.ask() == {A, C}
    assert hosts.source.answer().left_out == {"node-b": "its lease has not changed for 9 s"}
    assert hosts.clock.now_s >= 1009, "the first answer waits until the dead one is told from the others"


def test_a_lease_that_appears_later_counts_at_once_and_one_that_is_given_back_is_gone_at_once(hosts: Hosts) -> None:
    hosts.alive = {A}
    hosts.write()
    assert hosts.ask() == {A}
    hosts.write(B)
    assert hosts.ask(1.0) == {A, B}
    (hosts.folder / "node-a=1.lease").unlink()
    assert hosts.ask(1.0) == {B}


def test_a_lease_lapses_and_comes_back(hosts: Hosts) -> None:
    hosts.alive = {A, B}
    hosts.write()
    assert hosts.ask() == {A, B}
    hosts.write(A)
    assert hosts.ask(3.0) == {A, B}
    hosts.write(A)
    assert hosts.ask(3.0) == {A, B}
    hosts.write(A)
    assert hosts.ask(3.0) == {A}
    hosts.write(A, B)
    assert hosts.ask(3.0) == {A, B}


def test_a_pause_of_the_reader_ends_no_lease(hosts: Hosts) -> None:
    hosts.alive = {A}
    hosts.write()
    hosts.ask()
    assert hosts.ask(3600.0) == {A}, "the host has not had a chance to be seen"
    assert hosts.ask(3600.0) == {A}
    assert hosts.ask(3600.0) == set()


def test_an_outage_of_the_storage_ends_no_lease(hosts: Hosts) -> None:
    hosts.alive = {A}
    hosts.write()
    hosts.ask()
    hosts.ask(5.0)
    lease = hosts.folder / "node-a=1.lease"
    kept = lease.read_text()
    lease.write_text("half a le")
    os.utime(lease, (1.0, 1.0))
    for _ in range(5):
        with pytest.raises(DiscoveryError, match="is no lease"):
            hosts.ask(5.0)
    lease.write_text(kept)
    os.utime(lease, (1.0, 1.0))
    assert hosts.ask(5.0) == {A}, "its time begins anew"
    assert hosts.ask(5.0) == {A}


def test_a_folder_that_goes_between_the_listing_and_the_reading_ends_no_lease(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is mounted no more."""
    hosts.alive = {A, B}
    hosts.write()
    hosts.ask()
    away = hosts.folder.with_name("away")
    read = FileStorage.read

    def gone(storage: FileStorage, key: str, limit_bytes: int | None = None) -> bytes:
        with suppress(FileNotFoundError):  # several are read at once, and one of them is the first
            hosts.folder.rename(away)
        return read(storage, key, limit_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(FileStorage, "read", gone)
        with pytest.raises(DiscoveryError, match="nothing at"):
            hosts.ask(1.0)
    away.rename(hosts.folder)
    assert hosts.ask(1.0) == {A, B}


@pytest.mark.parametrize("written_s", [None, 0.0, 4e9], ids=["now", "1970", "2096"])
def test_clocks_of_hosts_and_storage_may_say_what_they_like(hosts: Hosts, written_s: float | None) -> None:
    hosts.alive = {A}
    hosts.write(A, written_s=written_s)
    hosts.write(B, written_s=4e9)
    assert hosts.ask() == {A}
    for _ in range(10):
        hosts.write(A, written_s=written_s)
        assert hosts.ask(3.0) == {A}


def test_a_host_with_other_slots_than_before_counts_once(hosts: Hosts) -> None:
    hosts.alive = {A, HostSlots("node-a", 4)}
    hosts.write()
    assert hosts.ask() == {HostSlots("node-a", 4)}


@pytest.mark.parametrize(
    ("name", "content"),
    [("notes.txt", "x"), ("a=0.lease", "{}"), ("a=1.lease", ""), ("a=1.lease", "[]"), ("a=1.lease", '{"holder": 1}'),
     ("bad host=1.lease", '{"holder": "x", "count": 1}')],
)  # fmt: skip
def test_what_is_no_lease_is_an_error_that_names_it(hosts: Hosts, name: str, content: str) -> None:
    (hosts.folder / name).write_text(content)
    with pytest.raises(DiscoveryError, match=r"lease|slots|host name"):
        hosts.ask()


def test_a_place_that_is_not_there_is_an_error_and_one_without_leases_has_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="edl-hvd lease"):
        Leases(str(tmp_path / "nowhere")).answer()
    assert Leases(str(tmp_path)).answer().hosts == ()


def test_the_memory_spares_another_process_the_wait(hosts: Hosts) -> None:
    hosts.alive = {A}
    hosts.write()
    hosts.ask()
    memory = json.loads(json.dumps(hosts.source.memory(hosts.clock.now_s)))
    hosts.source = Leases(str(hosts.folder), lapse_s=9.0, clock=hosts)
    hosts.source.recall(memory, hosts.clock.now_s)
    before_s = hosts.clock.now_s
    hosts.write(B)
    assert hosts.ask() == {A, B}
    assert hosts.clock.now_s == before_s


@pytest.mark.parametrize("memory", [None, 7, {}, {"leases": 3, "age_s": 1}, {"leases": {"a": 1}, "age_s": 1}])
def test_a_memory_of_another_version_is_none(hosts: Hosts, memory: object) -> None:
    hosts.alive = {A}
    hosts.write()
    hosts.source.recall(memory, 0.0)
    assert hosts.ask() == {A}


def test_a_held_lease_is_written_again_and_again_and_given_back(tmp_path: Path) -> None:
    older = tmp_path / "node-b=7.lease"
    older.write_text('{"holder": "before", "count": 3}')
    lease = HeldHostLease(str(tmp_path), B, every_s=0.01)
    path = tmp_path / "node-b=2.lease"
    first = json.loads(path.read_text())
    until(lambda: json.loads(path.read_text())["count"] > first["count"] + 3)
    assert json.loads(path.read_text())["holder"] == first["holder"]
    assert not older.exists(), "the one from before the host was lost"
    assert set(Leases(str(tmp_path), lapse_s=60.0).answer().hosts) == {B}
    lease.close()
    assert not path.exists()


def test_a_lease_that_cannot_be_written_says_so_once_and_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "leases"
    lease = HeldHostLease(str(folder), A, every_s=0.01, problem=told.append)
    before = threading.active_count()
    (folder / "node-a=1.lease").unlink()
    (folder / "node-a=1.lease").mkdir()
    (folder / "node-a=1.lease" / "x").touch()
    until(lambda: bool(told))
    (folder / "node-a=1.lease" / "x").unlink()
    (folder / "node-a=1.lease").rmdir()
    until(lambda: len(told) >= 2)
    lease.close()
    assert "node-a=1.lease" in told[0]
    assert told[1:] == [""]
    assert threading.active_count() < before


def test_the_first_write_has_to_succeed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        HeldHostLease(str(tmp_path / "file"), A)


def test_text_of_the_source() -> None:
    polled = read_source("leases:s3://bucket/job-7/hosts,lapse=30s")
    assert (polled.refresh_s, polled.stale_s, polled.first_s, polled.needs_packages) == (2, 300, 40, True)
    assert not make_source("leases", ["/shared/leases"], []).needs_packages
    with pytest.raises(UsageError, match="--lapse 0"):
        read_source("leases:/x,lapse=0")
    with pytest.raises(UsageError, match="not a storage URL"):
        read_source("leases:file:x")


@pytest.mark.parametrize("send", [os.kill, signal_another_thread])
def test_the_command_holds_a_lease_until_it_is_ended(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    words = [str(Path(sys.executable).with_name("edl-hvd")), "lease", str(tmp_path), "--host", "node-b", "--slots", "2",
             "--every", "0.05"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command, ExitStack() as stack:
        stack.callback(command.kill)
        assert "node-b=2.lease" in command.stdout.readline()
        assert set(Leases(str(tmp_path), lapse_s=60.0).answer().hosts) == {B}
        send(command.pid, signal.SIGTERM)
        assert command.wait(60) == 0
    assert list(tmp_path.glob("*.lease")) == []


def test_the_command_refuses_what_is_no_host(tmp_path: Path) -> None:
    words = [str(Path(sys.executable).with_name("edl-hvd")), "lease", str(tmp_path), "--host", "a:b"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "host name 'a:b'" in ended.stderr
