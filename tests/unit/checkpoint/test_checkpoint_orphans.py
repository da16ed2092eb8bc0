"""What dead attempts have left is collected, late, and nothing that an attempt may still need."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path

import pytest
from checkpoints import Gate, WatchedStorage, assert_equal, nothing_reported, snapshot_of, write, write_rank
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_ownership import elsewhere
from waiting import soon

from edl_hvd.checkpoint import CheckpointWriter, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.lease import acquire
from edl_hvd.checkpoint.retention.collector import GRACE_S, orphans, plan_by_hand
from edl_hvd.checkpoint.retention.policy import Facts, RetentionPolicy, carry_out
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.events import CheckpointFailed, CheckpointWritten, Event
from edl_hvd.storage import StoredObject, open_storage
from edl_hvd.values import Interval


class Job:
    """Rank 0 of a world of one, which writes a checkpoint whenever it is told to."""

    def __init__(self, storage: WatchedStorage, keep: int = 9, owner: int = 0, keep_every: str | None = None) -> None:
        self.clock = FakeClock()
        self._owner = owner
        every = Interval.parse(keep_every) if keep_every else None
        self.writer = CheckpointWriter(storage, keep, self.clock, keep_every=every)

    def begin(self, step: int, variant: int = 0) -> None:
        self.writer.begin(snapshot_of(step, variant), 0, 1, uuid.uuid4().hex, self._owner)

    def write(self, *steps: int) -> None:
        for step in steps:
            self.begin(step)
            assert [type(event) for event in self.events()] == [CheckpointWritten]

    def events(self) -> list[Event]:
        assert self.writer.wait(60)
        return self.writer.poll()

    def pass_grace(self) -> None:
        self.clock.now_s += GRACE_S


def keys(storage: WatchedStorage, step: int) -> list[str]:
    return [entry.key.removeprefix(object_keys.folder(step)) for entry in storage.list(object_keys.folder(step))]


def test_what_a_dead_attempt_left_goes_after_an_hour_and_not_before() -> None:
    storage = WatchedStorage()
    job = Job(storage)
    job.write(10)
    write_rank(storage, snapshot_of(25), 1, 2, "dead")
    write_rank(storage, snapshot_of(10, 1), 1, 2, "dead-too")
    left = {step: keys(storage, step) for step in (10, 25)}
    assert [len(names) for names in left.values()] == [4, 2]
    job.write(30)  # the first time that it is seen
    job.clock.now_s += GRACE_S - 1
    job.write(40)
    assert {step: keys(storage, step) for step in (10, 25)} == left
    job.clock.now_s += 1
    job.write(50)
    assert keys(storage, 25) == []
    assert keys(storage, 10) == ["manifest.json", "tensors-00000-of-00001.safetensors"]
    assert steps(storage) == [50, 40, 30, 10]
    for step in steps(storage):
        assert_equal(restore(storage, step), snapshot_of(step))


def test_what_another_process_found_an_hour_ago_does_not_count() -> None:
    storage = WatchedStorage()
    first, second = Job(storage), Job(storage)
    first.write(10)
    write_rank(storage, snapshot_of(25), 1, 2, "dead")
    first.write(30)
    second.pass_grace()
    second.write(40)
    assert keys(storage, 25)


def test_what_is_newer_than_the_checkpoint_just_written_waits_until_it_is_passed() -> None:
    storage = WatchedStorage()
    job = Job(storage)
    write_rank(storage, snapshot_of(25), 1, 2, "dead")
    job.write(10)
    job.pass_grace()
    job.write(20)
    job.pass_grace()
    job.write(30)
    assert keys(storage, 25)
    job.pass_grace()
    job.write(40)
    assert not keys(storage, 25)


def test_beside_a_milestone_orphans_wait_as_long_and_the_milestone_stays() -> None:
    storage = WatchedStorage()
    job = Job(storage, keep=1, keep_every="10 steps")
    job.write(10)
    write_rank(storage, snapshot_of(10, 1), 1, 2, "dead")
    job.write(20)
    assert len(keys(storage, 10)) == 4
    job.pass_grace()
    job.write(30)
    assert len(keys(storage, 10)) == 2
    assert_equal(restore(storage, 10), snapshot_of(10))


def test_strangers_files_are_no_orphans() -> None:
    storage = WatchedStorage()
    strangers = [object_keys.folder(10) + name for name in ("notes.txt", "tensors.safetensors", "more/parts/x.json")]
    for key in strangers:
        storage.write(key, b"mine")
    job = Job(storage)
    for step in (10, 20, 30):
        job.write(step)
        job.pass_grace()
    assert {entry.key for entry in storage.list(object_keys.folder(10))} > set(strangers)


@pytest.mark.parametrize("damage", [b"", b'{"format": 9}'], ids=["damaged", "of another version"])
def test_where_a_manifest_cannot_be_read_nothing_is_an_orphan(damage: bytes) -> None:
    storage = WatchedStorage()
    job = Job(storage, keep=1, keep_every="10 steps")
    job.write(10)
    write_rank(storage, snapshot_of(10, 1), 1, 2, "dead")
    storage.write(object_keys.manifest_key(10), damage)
    before = keys(storage, 10)
    for step in (20, 30, 40):
        job.write(step)
        job.pass_grace()
    assert keys(storage, 10) == before


def test_what_any_manifest_names_is_no_orphan_also_that_of_a_former_owner() -> None:
    storage = WatchedStorage()
    old = acquire(storage, elsewhere("old"), FakeClock())
    first = Job(storage, owner=old)
    first.write(10, 20)
    new = acquire(storage, elsewhere("new"), FakeClock(), take_over=True)
    before = keys(storage, 20)
    first.begin(30)  # taken over: what it adds does not count
    assert isinstance(first.events()[0], CheckpointFailed)
    late = keys(storage, 30)
    second = Job(storage, owner=new)
    second.write(20)  # its own one of a step that counts already
    for step in (40, 50, 60):
        second.write(step)
        second.pass_grace()
    assert set(keys(storage, 20)) > set(before)
    assert keys(storage, 30) == late
    assert_equal(restore(storage, 10), snapshot_of(10))
    for key in (object_keys.manifest_key(20), object_keys.manifest_key(30)):
        assert storage.exists(key)


def test_an_attempt_of_a_new_world_keeps_its_pieces_while_the_old_one_still_tidies_up() -> None:
    """The old world's rank 0 is held in its collection; an hour later the new world has written half a checkpoint."""
    storage = WatchedStorage()
    job = Job(storage, keep=1)
    write_rank(storage, snapshot_of(15), 1, 2, "dead")
    job.write(10)
    storage.watch = gate = Gate("delete", "manifest")
    job.begin(20)
    soon(gate.reached)  # it has looked, and is about to delete step 10
    job.writer.abandon()
    job.pass_grace()
    storage.watch = lambda method, key: None
    write_rank(storage, snapshot_of(30), 1, 2, "present")
    gate.open()
    for thread in threading.enumerate():
        if thread.name.startswith("edl-hvd-checkpoint"):
            soon(thread)
    assert len(keys(storage, 30)) == 2
    writer = CheckpointWriter(storage, clock=FakeClock())
    writer.begin(snapshot_of(30), 0, 2, "present")
    assert writer.wait(60)
    assert_equal(restore_newest(storage, nothing_reported), snapshot_of(30))


@pytest.mark.parametrize("gate", [("write_new", "manifest"), ("list", "checkpoints/000000000020/")])
def test_a_writer_that_was_stopped_until_its_pieces_were_collected_takes_its_manifest_back(
    gate: tuple[str, str],
) -> None:
    storage = WatchedStorage()
    stopped, others = Job(storage), Job(storage)
    stopped.write(10)
    storage.watch = held = Gate(*gate)
    stopped.begin(20)
    soon(held.reached)  # its shard is written; with the second gate it waits for nobody, and is about to look
    storage.watch = lambda method, key: None
    for step in (30, 40):
        others.write(step)
        others.pass_grace()
    assert keys(storage, 20) == ([] if gate[0] == "write_new" else keys(storage, 20))
    held.open()
    [event] = stopped.events()
    assert isinstance(event, CheckpointFailed)
    assert steps(storage) == [40, 30, 10]
    assert not keys(storage, 20)


def test_a_writer_that_was_stopped_until_its_step_was_too_old_takes_its_manifest_back() -> None:
    storage = WatchedStorage()
    stopped, others = Job(storage), Job(storage, keep=1)
    storage.watch = held = Gate("write_new", "manifest")
    stopped.begin(20)
    soon(held.reached)
    storage.watch = lambda method, key: None
    others.write(30)
    held.open()
    [event] = stopped.events()
    assert isinstance(event, CheckpointFailed)
    assert "the others have gone on while this process was stopped: checkpoints/000000000020/tensors" in event.reason
    assert steps(storage) == [30]
    assert not keys(storage, 20)


PLACES = st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from(["", "-a", "-b"]))


@given(
    shards=st.sets(PLACES, max_size=12),
    named=st.dictionaries(st.integers(0, 4), st.none() | st.sets(PLACES, max_size=6), max_size=5),
    written=st.integers(0, 4),
)
def test_an_orphan_is_a_piece_that_no_manifest_at_its_step_names(
    shards: set[tuple[int, int, str]], named: dict[int, set[tuple[int, int, str]] | None], written: int
) -> None:
    def key(step: int, place: tuple[int, int, str]) -> str:
        return object_keys.folder(step) + object_keys.shard_name(place[1], 4, place[2][1:] or None)

    there = {key(place[0], place) for place in shards} | {object_keys.part_key(step, "a", 0) for step in range(5)}
    manifests = {object_keys.manifest_key(step) for step in named}
    facts = {
        object_keys.manifest_key(step): None if places is None else Facts(0, 0, {}, {key(step, p): 1 for p in places})
        for step, places in named.items()
    }
    found = {entry.key for entry in orphans([StoredObject(one, 1) for one in there | manifests], facts, written)}
    expected = {
        one
        for one in there
        if (step := object_keys.step_of(one)) is not None
        and step <= written
        and (step not in named or (named[step] is not None and one not in facts[object_keys.manifest_key(step)].files))
    }
    assert found == expected


def test_pruning_by_hand_takes_what_was_left_more_than_an_hour_ago_beside_what_stays(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    write(storage, snapshot_of(10), keep=9)
    for rank, attempt in ((1, "long-dead"), (2, "just-dead")):
        write_rank(storage, snapshot_of(10, 1), rank, 3, attempt)
    write_rank(storage, snapshot_of(30), 1, 2, "newer than any checkpoint".replace(" ", "-"))
    write(storage, snapshot_of(20), keep=9)
    for entry in storage.list(object_keys.ROOT):
        age_s = GRACE_S - 60 if "just-dead" in entry.key or "00002-of" in entry.key else GRACE_S + 60
        os.utime(tmp_path / entry.key, (time.time() - age_s,) * 2)
    before = {entry.key for entry in storage.list()}
    pruning = plan_by_hand(storage, RetentionPolicy(9), SYSTEM_CLOCK)
    carry_out(storage, pruning, lambda done, of: None)
    gone = before - {entry.key for entry in storage.list()}
    assert sorted(gone) == sorted(pruning.orphans) == sorted(pruning.keys)
    assert [object_keys.step_of(key) for key in pruning.orphans] == [10, 10]
    assert any("long-dead" in key for key in gone)
    assert not any("just-dead" in key for key in gone)
    for step in (10, 20):
        assert_equal(restore(storage, step), snapshot_of(step))


def test_pruning_by_hand_leaves_what_it_does_not_know_the_age_of() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, snapshot_of(10))
    write_rank(storage, snapshot_of(10, 1), 1, 2, "dead")
    clock = FakeClock()
    clock.now_s += 10 * GRACE_S
    assert plan_by_hand(storage, RetentionPolicy(1), clock).keys == []


def test_pruning_by_hand_leaves_pieces_beside_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for step in (5, 10, 20):
        write(storage, snapshot_of(step), keep=9)
    (tmp_path / object_keys.manifest_key(10)).write_text("{")
    for entry in storage.list(object_keys.ROOT):
        os.utime(tmp_path / entry.key, (0, 0))
    assert plan_by_hand(storage, RetentionPolicy(2), SYSTEM_CLOCK).keys == []
