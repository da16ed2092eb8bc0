"""Of several workers that hold the same commit one writes it; the others wait for it, or write it instead."""

from __future__ import annotations

import threading

import pytest
from checkpoints import WatchedStorage, snapshot_of
from clocks import FakeClock, WatchedClock
from waiting import soon

from edl_hvd.checkpoint import CheckpointWriter
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.lease import (
    BEAT_S,
    PATIENCE_S,
    LeaseHolder,
    LeaseRenewal,
    acquire,
    history,
    note_saved,
)
from edl_hvd.checkpoint.reading.restoring import steps
from edl_hvd.checkpoint.writing.saver_claim import SaverClaim
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.errors import OwnedError, StorageError
from edl_hvd.storage import Storage

STEP = 7


def owned() -> tuple[WatchedStorage, int]:
    storage = WatchedStorage()
    return storage, acquire(storage, LeaseHolder.this_process("a", FakeClock()), FakeClock())


def write(storage: Storage, owner: int, step: int = STEP, keep: int = 3) -> None:
    writer = CheckpointWriter(storage, keep)
    writer.begin(snapshot_of(step), 0, 1, f"last-{step}-{threading.get_ident()}", owner)
    assert writer.wait(60)


def test_of_many_one_writes_and_the_others_are_told_when_it_is_there() -> None:
    storage, owner = owned()
    together, results = threading.Barrier(8), []

    def work() -> None:
        claim = SaverClaim(storage, STEP, owner, SYSTEM_CLOCK)
        soon(together)
        is_saver = claim.acquire()
        if is_saver:
            write(storage, owner)
            claim.give_up()
        results.append((is_saver, steps(storage)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        soon(thread)
    assert sorted(results) == [*[(False, [STEP])] * 7, (True, [STEP])]
    assert [entry.key for entry in storage.list(object_keys.parts_prefix(STEP))] == [], "nothing is left behind"


def test_what_is_there_already_is_not_written_again() -> None:
    storage, owner = owned()
    write(storage, owner)
    assert not SaverClaim(storage, STEP, owner, FakeClock()).acquire()


def test_a_claim_that_is_given_up_without_a_checkpoint_is_taken_by_another_at_once() -> None:
    storage, owner = owned()
    first = SaverClaim(storage, STEP, owner, FakeClock())
    assert first.acquire()
    clock = WatchedClock(first.give_up)
    assert SaverClaim(storage, STEP, owner, clock).acquire()
    assert clock.now_s - FakeClock().now_s < PATIENCE_S


def test_a_claim_that_is_not_renewed_is_taken_by_another() -> None:
    storage, owner = owned()
    assert SaverClaim(storage, STEP, owner, FakeClock()).acquire()
    clock = FakeClock()
    assert SaverClaim(storage, STEP, owner, clock).acquire()
    assert PATIENCE_S <= clock.now_s - FakeClock().now_s < 2 * PATIENCE_S


def test_a_claim_that_is_renewed_is_waited_for() -> None:
    storage, owner = owned()
    others_clock = FakeClock()
    other = SaverClaim(storage, STEP, owner, others_clock)
    assert other.acquire()

    def other_goes_on() -> None:
        others_clock.now_s = clock.now_s
        other.renew()
        if clock.now_s - FakeClock().now_s > 10 * PATIENCE_S:
            write(storage, owner)

    clock = WatchedClock(other_goes_on)
    assert not SaverClaim(storage, STEP, owner, clock).acquire()


def test_a_renewal_is_one_small_write_every_few_seconds_and_a_failed_one_is_no_error() -> None:
    storage, owner = owned()
    clock = FakeClock()
    claim = SaverClaim(storage, STEP, owner, clock)
    assert claim.acquire()
    written: list[str] = []

    def refuse(method: str, key: str) -> None:
        written.append(key)
        raise StorageError("away")

    storage.watch = refuse
    for _ in range(int(4 * BEAT_S)):
        clock.sleep(0.5)
        claim.renew()
    assert written == [object_keys.saver_key(STEP, owner)] * 2
    claim.give_up()


def test_workers_of_a_job_that_was_taken_over_write_nothing() -> None:
    storage, owner = owned()
    acquire(storage, LeaseHolder.this_process("b", FakeClock()), FakeClock(), take_over=True)
    with pytest.raises(OwnedError, match="was taken over"):
        SaverClaim(storage, STEP, owner, FakeClock()).acquire()
    assert storage.list(object_keys.ROOT) == []


def test_a_checkpoint_of_an_earlier_owner_at_the_same_step_is_none_of_this_one() -> None:
    storage, owner = owned()
    write(storage, owner)
    later = acquire(storage, LeaseHolder.this_process("b", FakeClock()), FakeClock(), take_over=True)
    assert SaverClaim(storage, STEP, later, FakeClock()).acquire()


def test_a_claim_that_a_killed_worker_has_left_goes_as_an_orphan() -> None:
    storage, owner = owned()
    assert SaverClaim(storage, STEP, owner, FakeClock()).acquire()
    write(storage, owner, STEP + 1, keep=1)
    assert storage.list(object_keys.folder(STEP)) == []


# Whether a loss counts


def test_a_survivor_that_has_saved_counts_as_no_loss() -> None:
    storage, owner = owned()
    note_saved(
        storage, owner, LeaseHolder("a", "far", 4711, "another machine", "its mark", "2026-01-02T03:04:05+00:00")
    )
    new = acquire(storage, LeaseHolder.this_process("b", FakeClock()), FakeClock())
    assert history(storage, new).losses == 0


def test_its_note_does_not_hide_that_the_owner_has_ended() -> None:
    storage, owner = owned()
    process = LeaseHolder.this_process("a", FakeClock())
    storage.write(object_keys.alive_key(owner), LeaseRenewal(process, 0, ended=True).encode())
    note_saved(storage, owner, process)
    clock = FakeClock()
    acquire(storage, LeaseHolder.this_process("b", FakeClock()), clock)
    assert clock.now_s == FakeClock().now_s, "the URL is free at once"


def test_its_note_does_not_end_an_owner_that_lives() -> None:
    storage, owner = owned()
    process = LeaseHolder.this_process("a", FakeClock())
    note_saved(storage, owner, process)
    numbers = iter(range(1, 10_000))

    def renew() -> None:
        storage.write(object_keys.alive_key(owner), LeaseRenewal(process, next(numbers), ended=False).encode())

    with pytest.raises(OwnedError, match="is alive"):
        acquire(storage, LeaseHolder.this_process("b", FakeClock()), WatchedClock(renew))


def test_a_note_that_cannot_be_written_is_no_error() -> None:
    storage, owner = owned()

    def refuse(method: str, key: str) -> None:
        raise StorageError("away")

    storage.watch = refuse
    note_saved(storage, owner, LeaseHolder.this_process("a", FakeClock()))
