"""One run at a time writes checkpoints at a URL, and a writer that was taken over harms nothing whenever it goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Gate, WatchedStorage, assert_equal, nothing_reported, snapshot_of
from clocks import FakeClock, WatchedClock
from waiting import LONG_S, soon

from edl_hvd.checkpoint import CheckpointWriter
from edl_hvd.checkpoint.format import document, object_keys
from edl_hvd.checkpoint.lease import (
    BEAT_S,
    PATIENCE_S,
    Heartbeat,
    LeaseHolder,
    LeaseRenewal,
    LossHistory,
    acquire,
    check_owner,
    history,
    newest_owner,
)
from edl_hvd.checkpoint.reading.restoring import restore, restore_newest, steps
from edl_hvd.errors import ObjectMissingError, OwnedError, StorageError
from edl_hvd.events import CheckpointFailed, CheckpointWritten
from edl_hvd.process_identity import pid_namespace, start_token
from edl_hvd.storage import Storage, StoredObject, open_storage


def elsewhere(run: str, host: str = "far") -> LeaseHolder:
    """A process of which nobody here can tell whether it lives."""
    return LeaseHolder(run, host, 4711, "another machine", "its mark", "2026-01-02T03:04:05+00:00")


def sign(
    storage: Storage, owner: int, process: LeaseHolder, number: int, ended: bool = False, failed: bool = False
) -> None:
    storage.write(object_keys.alive_key(owner), LeaseRenewal(process, number, ended, failed).encode())


def write_as(storage: Storage, owner: int, step: int, variant: int = 0, keep: int = 3) -> list[object]:
    writer = CheckpointWriter(storage, keep, FakeClock())
    writer.begin(snapshot_of(step, variant), 0, 1, f"{owner}-{step}-{variant}", owner)
    assert writer.wait(60)
    return list(writer.poll())


# Who may


def test_the_first_run_has_the_url_at_once_and_the_next_when_it_has_ended() -> None:
    storage, clock = WatchedStorage(), FakeClock()
    assert acquire(storage, elsewhere("a"), clock) == 1
    sign(storage, 1, elsewhere("a"), 9, ended=True)
    assert acquire(storage, elsewhere("b"), clock) == 2
    assert clock.now_s == FakeClock().now_s


def test_the_same_run_gets_it_again_at_once() -> None:
    storage, clock = WatchedStorage(), FakeClock()
    assert [acquire(storage, elsewhere("a", host), clock) for host in ("one", "two")] == [1, 2]
    assert clock.now_s == FakeClock().now_s


def test_a_run_that_gives_signs_of_life_keeps_it_and_is_named() -> None:
    storage = WatchedStorage()
    acquire(storage, elsewhere("a"), FakeClock())
    numbers = iter(range(1, 10_000))
    clock = WatchedClock(lambda: sign(storage, 1, elsewhere("a"), next(numbers)))
    with pytest.raises(OwnedError, match=r"host far, process 4711, .* since 2026-01-02T03:04:05\+00:00") as caught:
        acquire(storage, elsewhere("b"), clock)
    assert "--take-over" in str(caught.value)
    assert newest_owner(storage) == 1


def test_one_sign_late_in_the_wait_is_enough() -> None:
    storage = WatchedStorage()
    acquire(storage, elsewhere("a"), FakeClock())

    def late() -> None:
        if clock.now_s - FakeClock().now_s >= PATIENCE_S - 1:
            sign(storage, 1, elsewhere("a"), 1)

    clock = WatchedClock(late)
    with pytest.raises(OwnedError):
        acquire(storage, elsewhere("b"), clock)


def test_a_silent_run_loses_it_after_three_signs_that_did_not_come() -> None:
    storage, clock = WatchedStorage(), FakeClock()
    acquire(storage, elsewhere("a"), clock)
    assert acquire(storage, elsewhere("b"), clock) == 2
    assert clock.now_s - FakeClock().now_s == pytest.approx(PATIENCE_S, abs=1)


def test_a_run_that_is_about_to_end_is_waited_for() -> None:
    """Its driver was killed, and its workers are saving what they hold when the next one is started."""
    storage = WatchedStorage()
    acquire(storage, elsewhere("a"), FakeClock())
    numbers = iter(range(1, 10_000))
    clock = WatchedClock(lambda: sign(storage, 1, elsewhere("a"), number := next(numbers), ended=number > 12))
    assert acquire(storage, elsewhere("b"), clock) == 2


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for_long_and_one_that_lives_is_believed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = LeaseHolder("a", "here", child.pid, pid_namespace(), start_token(child.pid), "today")
    storage, clock = WatchedStorage(), FakeClock()
    acquire(storage, owner, clock)
    with pytest.raises(OwnedError, match=f"process {child.pid}"):  # it may be stopped, and gives no sign
        acquire(storage, elsewhere("b"), clock)
    child.communicate()
    clock = FakeClock()
    assert acquire(storage, elsewhere("b"), clock) == 2
    assert 0 < clock.now_s - FakeClock().now_s < PATIENCE_S / 2


def test_of_many_at_once_each_gets_a_number_of_its_own() -> None:
    storage = WatchedStorage()
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda run=run: numbers.append(acquire(storage, elsewhere(run), FakeClock(), True)))
        for run in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        soon(thread)
    assert sorted(numbers) == list(range(1, 9))


def test_taking_over_ends_the_other_and_says_who_did_it() -> None:
    storage = WatchedStorage()
    acquire(storage, elsewhere("a"), FakeClock())
    heartbeat = Heartbeat(storage, 1, elsewhere("a"), beat_s=0.01)
    assert acquire(storage, LeaseHolder.this_process("b", FakeClock()), FakeClock(), take_over=True) == 2
    heartbeat._thread.join(60)  # it ends by itself
    assert f"process {os.getpid()}" in str(heartbeat.lost)
    with pytest.raises(OwnedError):
        check_owner(storage, 1)
    check_owner(storage, 2)


def test_a_heartbeat_that_ends_frees_the_url_and_one_that_was_taken_over_does_not() -> None:
    storage, clock = WatchedStorage(), FakeClock()
    acquire(storage, elsewhere("a"), clock)
    Heartbeat(storage, 1, elsewhere("a")).stop(ended=True)
    acquire(storage, elsewhere("b"), clock)
    assert clock.now_s == FakeClock().now_s
    Heartbeat(storage, 1, elsewhere("a")).stop(ended=True)
    acquire(storage, elsewhere("c"), clock)
    assert clock.now_s > FakeClock().now_s, "the second owner has not ended"


class UnlistedStorage(WatchedStorage):
    """Lists no owner, whoever there is: its listings are filtered, or old."""

    def list(self, prefix: str = "") -> list[StoredObject]:
        return [] if prefix == object_keys.OWNERS else super().list(prefix)


def test_a_storage_that_refuses_to_create_what_it_does_not_list_is_not_asked_for_ever() -> None:
    storage, clock = UnlistedStorage(), FakeClock()
    asked: list[str] = []
    acquire(storage, elsewhere("a"), clock)
    storage.watch = lambda method, key: asked.append(method) if method == "write_new" else None
    with pytest.raises(StorageError, match=r"'owners/00001.json' exists already, and is not listed") as caught:
        acquire(storage, elsewhere("b"), clock)
    assert "s3:ListBucket" in str(caught.value)
    assert len(asked) <= 20
    assert clock.now_s - FakeClock().now_s >= 0.5 * (len(asked) - 1), "it pauses"


def test_what_signs_of_life_cost_a_month_is_what_the_document_says() -> None:
    storage = WatchedStorage()
    acquire(storage, elsewhere("a"), FakeClock())
    calls: list[str] = []
    has_written = threading.Event()

    def watch(method: str, key: str) -> None:
        calls.append(method)
        if method == "write":
            has_written.set()

    storage.watch = watch
    heartbeat = Heartbeat(storage, 1, elsewhere("a"), beat_s=1000.0)
    soon(has_written)
    heartbeat.stop(ended=False)
    prices_usd = {"list": 0.005 / 1000, "write": 0.005 / 1000, "read": 0.0004 / 1000}  # of S3 Standard
    month_usd = sum(prices_usd[method] for method in calls) * 30 * 86400 / BEAT_S
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    [told_usd] = re.findall(r"about (\d+\.\d+) dollars a month", text)
    assert float(told_usd) == pytest.approx(month_usd, rel=0.03)


# What became of former owners


def test_an_owner_whose_workers_all_went_without_saving_is_a_loss_and_one_that_ended_is_none(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path)), FakeClock()
    assert acquire(storage, elsewhere("a"), clock) == 1
    assert history(storage, 1) == LossHistory(0, 0.0)
    os.utime(tmp_path / object_keys.owner_key(1), (1000.0, 1000.0))
    os.utime(tmp_path / object_keys.alive_key(1), (4600.0, 4600.0))
    assert acquire(storage, elsewhere("a"), clock) == 2, "the same run, whose workers were all lost"
    assert history(storage, 2) == LossHistory(1, 3600.0)
    sign(storage, 2, elsewhere("a"), 9, ended=True)
    assert acquire(storage, elsewhere("b"), clock) == 3
    assert history(storage, 3).losses == 1
    acquire(storage, elsewhere("c"), clock)
    assert history(storage, 4).losses == 2, "it was silent"
    acquire(storage, elsewhere("d"), clock, take_over=True)
    assert history(storage, 5).losses == 2, "it may live"


def test_an_owner_that_ended_by_an_error_of_its_script_is_no_loss_of_hosts(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path)), FakeClock()
    acquire(storage, elsewhere("a"), clock)
    heartbeat = Heartbeat(storage, 1, elsewhere("a"), beat_s=1000.0)
    heartbeat.stop(ended=False, failed=True)
    acquire(storage, elsewhere("a"), clock)
    assert history(storage, 2).losses == 0
    sign(storage, 2, elsewhere("a"), 0, failed=True)
    sign(storage, 2, elsewhere("a"), 1)  # a survivor goes on
    acquire(storage, elsewhere("a"), clock)
    assert history(storage, 3).losses == 1


def test_a_renewal_of_a_worker_that_failed_is_one_of_an_owner_that_may_live_for_former_versions() -> None:
    written = document.decode(LeaseRenewal(elsewhere("a"), 0, ended=False, failed=True).encode())
    assert sorted(written) == ["ended", "number", "process"]
    assert written["ended"] is not True
    assert LeaseRenewal.decode(LeaseRenewal(elsewhere("a"), 3, ended=True).encode()).ended


def test_a_history_of_a_former_version_or_of_nonsense_is_none() -> None:
    storage = WatchedStorage()
    for content in ({}, {"losses": "many", "watched_s": 1.0}, {"losses": 1, "watched_s": float("inf")}):
        storage.write(object_keys.accepted_key(7), document.encode({"manifests": [], **content}))
        assert history(storage, 7) == LossHistory()
    assert history(storage, 8) == LossHistory()


def test_entries_of_owners_of_long_ago_go() -> None:
    storage = WatchedStorage()
    for run in "abcdefgh":
        acquire(storage, elsewhere(run), FakeClock(), take_over=True)
    assert object_keys.owners(storage.list(object_keys.OWNERS)) == [8, 7, 6]


# What counts


def test_the_checkpoints_of_an_owner_that_ended_count_and_later_ones_of_its_own_do_not() -> None:
    storage = WatchedStorage()
    old = acquire(storage, elsewhere("a"), FakeClock())
    write_as(storage, old, 10)
    new = acquire(storage, elsewhere("b"), FakeClock(), take_over=True)
    [event] = write_as(storage, old, 20)
    assert isinstance(event, CheckpointFailed)
    assert "taken over by the job on host far, process 4711" in event.reason
    assert steps(storage) == [10]
    with pytest.raises(ObjectMissingError, match="after another had taken over"):
        restore(storage, 20)
    [event] = write_as(storage, new, 20, variant=5)
    assert isinstance(event, CheckpointWritten)
    assert_equal(restore(storage, 20), snapshot_of(20, 5))
    assert_equal(restore(storage, 10), snapshot_of(10))


def test_a_later_owners_checkpoint_of_a_step_counts_more_than_the_one_it_found() -> None:
    storage = WatchedStorage()
    for owner in (1, 2, 3):
        assert acquire(storage, elsewhere(str(owner)), FakeClock(), take_over=True) == owner
        write_as(storage, owner, 10, variant=owner)
        assert_equal(restore_newest(storage, nothing_reported), snapshot_of(10, owner))


def test_what_an_owner_of_an_owner_found_still_counts() -> None:
    storage = WatchedStorage()
    for owner in (1, 2, 3):
        acquire(storage, elsewhere(str(owner)), FakeClock(), take_over=True)
        write_as(storage, owner, 10 * owner)
    write_as(storage, 1, 40)
    write_as(storage, 2, 50)
    assert steps(storage) == [30, 20, 10]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"format":3,"checksum":"","content":{}}'], ids=["empty", "torn", "wrong"]
)
def test_a_damaged_list_of_what_was_found_does_not_count_and_loses_nothing(damage: bytes) -> None:
    storage = WatchedStorage()
    for owner in (1, 2, 3):
        acquire(storage, elsewhere(str(owner)), FakeClock(), take_over=True)
        write_as(storage, owner, 10 * owner)
    storage.write(object_keys.accepted_key(3), damage)
    storage.write(object_keys.owner_key(3), damage)
    assert steps(storage) == [30, 20, 10]
    assert acquire(storage, elsewhere("4"), FakeClock()) == 4
    assert steps(storage) == [30, 20, 10]


class DeadError(BaseException):
    """The process has ended here."""


def calls_of(action: Callable[[WatchedStorage], object], prepare: Callable[[WatchedStorage], object]) -> int:
    storage = WatchedStorage()
    prepare(storage)
    count = 0

    def watch(method: str, key: str) -> None:
        nonlocal count
        count += 1

    storage.watch = watch
    action(storage)
    return count


def test_an_owner_that_dies_anywhere_while_it_takes_over_loses_nothing() -> None:
    def prepare(storage: WatchedStorage) -> None:
        for owner in (1, 2, 3, 4):
            acquire(storage, elsewhere(str(owner)), FakeClock(), take_over=True)
            write_as(storage, owner, 10 * owner)

    def action(storage: WatchedStorage) -> int:
        return acquire(storage, elsewhere("new"), FakeClock())

    count = calls_of(action, prepare)
    assert count > 8
    for last in range(count):
        storage = WatchedStorage()
        prepare(storage)
        left = last

        def watch(method: str, key: str) -> None:
            nonlocal left
            if left == 0:
                raise DeadError
            left -= 1

        storage.watch = watch
        with pytest.raises(DeadError):
            action(storage)
        storage.watch = lambda method, key: None
        assert steps(storage) == [40, 30, 20]
        number = acquire(storage, elsewhere("next"), FakeClock())
        assert number in (5, 6)
        assert steps(storage) == [40, 30, 20]
        assert isinstance(write_as(storage, number, 50)[0], CheckpointWritten)
        assert steps(storage) == [50, 40, 30]


class Pause:
    """Holds one thread's call number ``at`` until it may go on."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.reached = threading.Event()
        self._goes_on = threading.Event()

    def __call__(self, method: str, key: str) -> None:
        if threading.current_thread().name.startswith("edl-hvd-checkpoint-old"):
            if self._left == 0:
                self.reached.set()
                self._goes_on.wait(LONG_S)
            self._left -= 1

    def end(self) -> None:
        self._goes_on.set()


def test_an_old_writer_that_is_paused_before_any_call_and_goes_on_later_harms_nothing() -> None:
    """Step 40 with two checkpoints to keep: a shard, a manifest, and then two older checkpoints are deleted."""

    def prepare(storage: WatchedStorage) -> None:
        acquire(storage, elsewhere("old"), FakeClock())
        for step in (10, 20, 30):
            write_as(storage, 1, step, keep=9)

    def begin(storage: WatchedStorage) -> CheckpointWriter:
        writer = CheckpointWriter(storage, 2, FakeClock())
        writer.begin(snapshot_of(40), 0, 1, "old-40", 1)
        return writer

    def whole(storage: WatchedStorage) -> None:
        assert begin(storage).wait(60)

    count = calls_of(whole, prepare)
    assert count > 15
    for at in range(count):
        storage = WatchedStorage()
        prepare(storage)
        storage.watch = pause = Pause(at)
        old = begin(storage)
        assert pause.reached.wait(60)
        new = acquire(storage, elsewhere("new"), FakeClock(), take_over=True)
        found = restore_newest(storage, nothing_reported)
        assert found is not None
        # It goes on from an older one than there is, and comes by the same steps again.
        expected = {}
        for step in (20, 30, 40, 50):
            [event] = write_as(storage, new, step, variant=at + 1, keep=4)
            assert isinstance(event, CheckpointWritten)
            expected[step] = snapshot_of(step, at + 1)
        pause.end()
        assert old.wait(60)
        if found.step == 30:
            assert not any(isinstance(event, CheckpointWritten) for event in old.poll()), at
        assert steps(storage) == [50, 40, 30, 20]
        for step, snapshot in expected.items():
            assert_equal(restore(storage, step), snapshot)


def test_whoever_is_told_that_a_checkpoint_is_written_finds_it_after_any_take_over() -> None:
    """The next owner comes before a call of the writer's: either it finds the checkpoint, or the writer hears of it."""
    for gate in (("write_new", "tensors"), ("write_new", "manifest"), ("list", "owners/")):
        storage = WatchedStorage()
        acquire(storage, elsewhere("old"), FakeClock())
        storage.watch = held = Gate(*gate)
        writer = CheckpointWriter(storage, 2, FakeClock())
        writer.begin(snapshot_of(40), 0, 1, "old-40", 1)
        soon(held.reached)
        storage.watch = lambda method, key: None
        acquire(storage, elsewhere("new"), FakeClock(), take_over=True)
        held.open()
        assert writer.wait(60)
        written = any(isinstance(event, CheckpointWritten) for event in writer.poll())
        assert not written or steps(storage) == [40]


def test_a_storage_that_does_not_answer_makes_nobody_an_owner() -> None:
    def refuse(method: str, key: str) -> None:
        raise StorageError("no answer")

    storage = WatchedStorage(refuse)
    with pytest.raises(StorageError, match="no answer"):
        acquire(storage, elsewhere("a"), FakeClock())
    heartbeat = Heartbeat(storage, 1, elsewhere("a"))
    heartbeat.stop(ended=True)
    assert heartbeat.lost is None
