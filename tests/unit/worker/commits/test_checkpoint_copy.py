"""The copy a checkpoint is written from: made beside the next batch, of the commit and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_world import alone
from test_light_commits import assert_equal, everything, finish, make, move, train

import edl_hvd
from edl_hvd.checkpoint import CheckpointWriter, restore_newest
from edl_hvd.checkpoint.format.snapshot import Snapshot
from edl_hvd.errors import StateError
from edl_hvd.events import CheckpointFailed, CheckpointWritten
from edl_hvd.storage.memory import MemoryStorage
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


@pytest.fixture(autouse=True)
def in_a_world() -> Iterator[None]:
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        yield


def assert_holds(snapshot: Snapshot, before) -> None:
    assert_equal((before[0], dict(snapshot.tensors)), before)


def holds_live_tensors(state, snapshot: Snapshot) -> bool:
    live = {tensor.data_ptr() for tensor in state._runtime.store.live(0)[1].values()}
    return any(tensor.data_ptr() in live for tensor in snapshot.tensors.values())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_next_step_waits_for_a_copy_of_what_it_is_about_to_move(optimizer):
    state = train(make(lambda parameters: optimizer(parameters, lr=0.1)), 4)
    before = everything(state)
    deferred = state._runtime.store.deferred_snapshot()
    move(state)  # makes the copy, as nobody else has
    deferred.materialise()
    assert_holds(deferred.value, before)
    assert not holds_live_tensors(state, deferred.value)


def test_what_the_writer_has_copied_is_not_copied_again():
    state = train(make(), 4)
    deferred = state._runtime.store.deferred_snapshot()
    deferred.materialise()
    for tensor in deferred.value.tensors.values():
        tensor.zero_()
    move(state)
    finish(state)
    assert not any(tensor.any() for tensor in deferred.value.tensors.values())


@pytest.mark.parametrize("moment", ["commit", "return to the commit", "state of another", "state between two commits"])
def test_whatever_moves_the_state_waits_for_the_copy(moment):
    state = train(make(), 4)
    before = everything(state)
    other = train(make(), 7)._runtime.store
    deferred = state._runtime.store.deferred_snapshot()
    state.model(torch.randn(8, 4))  # BatchNorm moves what the commit has copied
    if moment == "commit":
        state._runtime.store.save(state._runtime.store.commit + 1)
    elif moment == "return to the commit":
        state._runtime.store.restore()
    elif moment == "state of another":
        state._runtime.store.load(*other.live(7))
    else:
        state._runtime.store.take_over(*other.between())
    deferred.materialise()
    assert_holds(deferred.value, before)


def in_place(state) -> None:
    with torch.no_grad():
        state.model[0].weight.mul_(0.5)


def past_the_counter(state) -> None:
    state.model[0].weight.data.mul_(0.5)


@pytest.mark.parametrize("write", [in_place, past_the_counter])
@pytest.mark.parametrize("who", ["the writer", "the next step"])
def test_a_copy_of_parameters_that_the_script_has_moved_itself_is_refused_and_the_next_is_made_at_once(write, who):
    state = train(make(), 4)
    deferred = state._runtime.store.deferred_snapshot()
    write(state)
    if who == "the next step":
        move(state)
    with pytest.raises(StateError, match="moved parameters besides its optimizers"):
        deferred.materialise()
    if who == "the writer":
        move(state)
    finish(state)
    before = everything(state)
    snapshot = state._runtime.store.deferred_snapshot()
    assert isinstance(snapshot, Snapshot), "it is not deferred"
    write(state)
    assert_holds(snapshot, before)


def test_a_copy_that_nobody_wants_is_not_made():
    state = train(make(), 4)
    deferred = state._runtime.store.deferred_snapshot()
    for tensor in deferred.value.tensors.values():
        tensor.zero_()
    state._runtime.store.drop_snapshot()
    move(state)
    assert not any(tensor.any() for tensor in deferred.value.tensors.values())


def test_a_checkpoint_begun_before_a_step_holds_the_commit_and_one_that_was_torn_is_not_listed():
    state = train(make(), 4)
    storage = MemoryStorage("late")
    writer = CheckpointWriter(storage)
    before = everything(state)
    writer.begin(state._runtime.store.deferred_snapshot(), 0, 1, "whole")
    move(state)
    assert writer.wait(60)
    finish(state)
    deferred = state._runtime.store.deferred_snapshot()
    in_place(state)
    writer.begin(deferred, 0, 1, "torn")
    assert writer.wait(60)
    written, failed = writer.poll()
    assert isinstance(written, CheckpointWritten)
    assert isinstance(failed, CheckpointFailed)
    assert failed.reason.startswith("the script moved parameters besides its optimizers")
    restored = restore_newest(storage, report=lambda event: None)
    assert restored is not None
    assert_holds(restored, before)
