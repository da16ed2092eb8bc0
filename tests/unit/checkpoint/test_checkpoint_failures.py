"""Writing checkpoints while something fails, or is given up half-way."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import Gate, WatchedStorage, assert_equal, nothing_reported, snapshot_of, write, write_rank
from clocks import FakeClock
from waiting import soon

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys, shards
from edl_hvd.checkpoint.format.checksum import checksum
from edl_hvd.errors import StorageError
from edl_hvd.events import CheckpointFailed, CheckpointWritten, Event

# Failures


def failure(events: list[Event]) -> str:
    [event] = events
    assert isinstance(event, CheckpointFailed)
    return event.reason


def test_rank_0_gives_up_on_a_rank_that_does_not_write_and_names_it() -> None:
    storage, clock = WatchedStorage(), FakeClock()
    begin_s = clock.now_s
    write_rank(storage, snapshot_of(1), 1, 3, "a")
    writer = CheckpointWriter(storage, clock=clock, patience_s=60)
    writer.begin(snapshot_of(1), 0, 3, "a")
    assert writer.wait(60)
    reason = failure(writer.poll())
    assert "the share of rank 2 did not appear" in reason
    assert "rank 1" not in reason
    assert "every host must see the same storage" in reason
    assert 60 <= clock.now_s - begin_s < 61
    assert steps(storage) == []


def test_plain_state_that_is_no_json_fails_the_checkpoint_and_names_what_it_is() -> None:
    storage = WatchedStorage()
    writer = CheckpointWriter(storage)
    writer.begin(Snapshot({"a": torch.ones(2)}, {"callback": print}), 0, 1, "a")
    assert writer.wait(60)
    assert "plain['callback'] is a builtin_function_or_method; expected a JSON value" in failure(writer.poll())
    assert steps(storage) == []


def test_rank_0_waits_longer_where_its_own_share_took_long() -> None:
    clock = FakeClock()

    def slow(method: str, key: str) -> None:
        if "tensors" in key:
            clock.sleep(100)

    begin_s = clock.now_s
    writer = CheckpointWriter(WatchedStorage(slow), clock=clock, patience_s=60)
    writer.begin(snapshot_of(1), 0, 2, "a")
    assert writer.wait(60)
    assert "within 400 s" in failure(writer.poll())
    assert 500 <= clock.now_s - begin_s < 501


def test_a_folder_that_is_not_shared_between_hosts_is_recognised() -> None:
    """The part arrives, but the shard it describes lies on another disk."""
    here, elsewhere = WatchedStorage(), WatchedStorage()
    assert write_rank(elsewhere, snapshot_of(1), 1, 2, "a") == []
    key = object_keys.part_key(1, "a", 1)
    here.write(key, elsewhere.read(key))
    reason = failure(write_rank(here, snapshot_of(1), 0, 2, "a"))
    assert "tensors-00001-of-00002.safetensors of rank 1" in reason
    assert "every host must see the same storage" in reason
    assert steps(here) == []


def test_a_shard_of_the_wrong_length_is_not_made_visible() -> None:
    storage = WatchedStorage()
    write_rank(storage, snapshot_of(1), 1, 2, "a")
    shard = object_keys.folder(1) + object_keys.shard_name(1, 2)
    storage.write(shard, storage.read(shard)[:-1])
    assert "tensors-00001-of-00002.safetensors of rank 1" in failure(write_rank(storage, snapshot_of(1), 0, 2, "a"))
    assert steps(storage) == []


def test_a_rank_that_fails_tells_rank_0_which_does_not_wait_for_it() -> None:
    def full(method: str, key: str) -> None:
        if "tensors-00001" in key:
            raise StorageError("no space left on device")

    storage, clock = WatchedStorage(full), FakeClock()
    assert failure(write_rank(storage, snapshot_of(1), 1, 2, "a")) == "no space left on device"
    begin_s = clock.now_s
    writer = CheckpointWriter(storage, clock=clock)
    writer.begin(snapshot_of(1), 0, 2, "a")
    assert writer.wait(60)
    assert failure(writer.poll()) == "rank 1 could not write its share: no space left on device"
    assert clock.now_s == begin_s
    assert steps(storage) == []


def test_a_failure_is_reported_before_rank_0_is_told_which_may_take_long() -> None:
    gate = Gate("write", "parts/")

    def fail(method: str, key: str) -> None:
        if "tensors" in key:
            raise StorageError("the storage does not answer")
        gate(method, key)

    writer = CheckpointWriter(WatchedStorage(fail))
    writer.begin(snapshot_of(1), 1, 2, "a")
    assert gate.reached.wait(60)
    assert failure(writer.poll()) == "the storage does not answer"
    gate.open()
    assert writer.wait(60)
    assert writer.poll() == []


@pytest.mark.parametrize("stays_away", [False, True], ids=["one call fails", "all calls fail from then on"])
def test_wherever_the_storage_fails_what_is_listed_restores_and_the_next_checkpoint_works(stays_away: bool) -> None:
    """The failing call moves through a whole checkpoint of two ranks, old ones being removed included."""

    def attempt_with_failure_at(number: int) -> tuple[int, list[Event]]:
        storage = WatchedStorage()
        write(storage, snapshot_of(10), size=2, keep=1)
        calls = []

        def fail(method: str, key: str) -> None:
            calls.append(method)
            if len(calls) == number or (stays_away and len(calls) > number):
                raise StorageError("gone")

        storage.watch = fail
        events = [event for rank in write(storage, snapshot_of(20), size=2, keep=1) for event in rank]
        storage.watch = lambda method, key: None
        assert all(isinstance(event, CheckpointWritten | CheckpointFailed) for event in events)
        written = any(isinstance(event, CheckpointWritten) for event in events)
        assert written == (20 in steps(storage))
        assert steps(storage), "the older one goes only once the newer one stands"
        for step in steps(storage):
            assert_equal(restore(storage, step), snapshot_of(step))
        write(storage, snapshot_of(30), size=2, keep=1)
        assert_equal(restore_newest(storage, nothing_reported), snapshot_of(30))
        assert [object_keys.step_of(entry.key) for entry in storage.list()] == [30] * 3, "nothing is left behind"
        return len(calls), events

    calls, events = attempt_with_failure_at(10_000)
    assert [type(event) for event in events] == [CheckpointWritten]
    assert calls > 8
    outcomes = [attempt_with_failure_at(number)[1] for number in range(1, calls + 1)]
    kinds = {type(event) for events in outcomes for event in events}
    assert kinds == {CheckpointWritten, CheckpointFailed}


def test_even_an_error_nobody_thought_of_ends_in_an_event() -> None:
    def surprise(method: str, key: str) -> None:
        raise MemoryError("no memory")

    assert failure(write_rank(WatchedStorage(surprise), snapshot_of(1), 0, 1, "a")) == "MemoryError: no memory"


def test_ranks_that_hold_different_states_write_no_checkpoint() -> None:
    other_tensors = Snapshot({**snapshot_of(1).tensors, "extra": torch.ones(100)}, {}, 1, 0, 32)
    other_type = Snapshot({name: tensor.double() for name, tensor in snapshot_of(1).tensors.items()}, {}, 1, 0, 32)
    other_position = Snapshot(snapshot_of(1).tensors, {}, 1, 0, 33)
    for other, words in (
        (other_tensors, "do not hold the same tensors"),
        (other_type, "do not hold the same tensors"),
        (other_position, "rank 1 wrote step 1, epoch 0, 33 samples; rank 0 wrote step 1, epoch 0, 32 samples"),
    ):
        storage = WatchedStorage()
        write_rank(storage, other, 1, 2, "a")
        assert words in failure(write_rank(storage, snapshot_of(1), 0, 2, "a"))
        assert steps(storage) == []


# Attempts that were given up, and their late effects


def test_abandon_does_not_wait_for_an_upload_and_the_late_upload_harms_nothing() -> None:
    """A writer paused in its upload goes on after the same step was checkpointed anew, with other contents."""
    gate = Gate("write_new", "tensors")
    storage = WatchedStorage(gate)
    writer = CheckpointWriter(storage)
    snapshot = snapshot_of(5, variant=1)
    writer.begin(snapshot, 0, 1, "first")
    soon(gate.reached)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "edl-hvd-checkpoint-first"]
    writer.abandon()
    assert not writer.busy
    for tensor in snapshot.tensors.values():
        tensor.zero_()  # the caller's again
    storage.watch = lambda method, key: None
    writer.begin(snapshot_of(5, variant=2), 0, 1, "second")
    assert writer.wait(60)
    gate.open()
    soon(thread)
    assert [type(event) for event in writer.poll()] == [CheckpointWritten]
    assert_equal(restore_newest(storage, nothing_reported), snapshot_of(5, variant=2))
    writer.close()


def test_a_shard_that_a_dead_attempt_left_is_not_touched_and_not_used() -> None:
    storage = WatchedStorage()
    write_rank(storage, snapshot_of(5, variant=1), 1, 2, "dead")
    write(storage, snapshot_of(5, variant=2), size=2, attempt="alive")
    assert_equal(restore(storage, 5), snapshot_of(5, variant=2))
    assert [entry.key.rpartition("/")[2] for entry in storage.list()] == [
        "manifest.json",
        "dead-00001.json",
        "tensors-00000-of-00002.safetensors",
        "tensors-00001-of-00002-alive.safetensors",
        "tensors-00001-of-00002.safetensors",
    ]


def test_no_manifest_is_written_after_abandon_has_returned() -> None:
    for method, in_key in (("list", ""), ("write_new", "tensors")):
        gate = Gate(method, in_key)
        storage = WatchedStorage(gate)
        writer = CheckpointWriter(storage)
        writer.begin(snapshot_of(1), 0, 1, "a")
        soon(gate.reached)
        writer.abandon()
        gate.open()
        writer.close()
        assert steps(storage) == []
        assert writer.poll() == []


def test_an_upload_that_fails_after_abandon_is_nobodys_news() -> None:
    gate = Gate("write_new", "tensors")

    def fail_late(method: str, key: str) -> None:
        gate(method, key)
        if "tensors" in key:
            raise StorageError("connection lost")

    storage = WatchedStorage(fail_late)
    writer = CheckpointWriter(storage)
    writer.begin(snapshot_of(1), 1, 2, "a")
    soon(gate.reached)
    writer.abandon()
    gate.open()
    writer.close()
    assert writer.poll() == []
    assert storage.list() == []


def test_abandon_while_the_share_is_looked_through_lets_go_of_the_snapshot_after_one_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def slowly(data: Any) -> str:
        if isinstance(data, bytes):
            return checksum(data)  # the header, which is no part of the snapshot
        read.append(len(data))
        first.set()
        soon(go_on)
        return checksum(data)

    monkeypatch.setattr(shards, "checksum", slowly)
    monkeypatch.setattr("edl_hvd.checkpoint.writing.attempt.pack", partial(shards.pack, chunk_bytes=1000))
    writer = CheckpointWriter(WatchedStorage())
    writer.begin(Snapshot({"w": torch.ones(10_000)}, step=1), 0, 1, "a")
    soon(first)
    attempt = writer._attempt
    assert attempt is not None
    thread = threading.Thread(target=writer.abandon)
    thread.start()
    soon(attempt._cancelled)
    assert thread.is_alive(), "this chunk is still read"
    go_on.set()
    soon(thread)
    writer.close()
    assert read == [1000]
    assert writer.poll() == []


def test_abandon_waits_for_a_manifest_that_is_being_written() -> None:
    gate = Gate("write_new", "manifest")
    storage = WatchedStorage(gate)
    writer = CheckpointWriter(storage)
    writer.begin(snapshot_of(1), 0, 1, "a")
    soon(gate.reached)
    listed: list[list[int]] = []

    def abandon() -> None:
        writer.abandon()
        listed.append(steps(storage))

    thread = threading.Thread(target=abandon)
    thread.start()
    gate.open()
    soon(thread)
    assert listed == [[1]]
    assert_equal(restore(storage, 1), snapshot_of(1))
    writer.close()


def test_abandon_ends_a_wait_for_other_ranks_without_an_event() -> None:
    polled = threading.Event()
    storage = WatchedStorage(lambda method, key: polled.set() if method == "list" else None)
    writer = CheckpointWriter(storage, patience_s=1e9)
    writer.begin(snapshot_of(1), 0, 2, "a")
    soon(polled)
    writer.abandon()
    writer.close()
    assert writer.poll() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edl-hvd-checkpoint")]
