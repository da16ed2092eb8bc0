"""Which checkpoints stay: the newest intact ones, milestones, the best by a metric."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import WatchedStorage, assert_equal, nothing_reported, snapshot_of, write, write_rank
from clocks import FakeClock
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edl_hvd.checkpoint import CheckpointWriter, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.reading.catalog import Catalog
from edl_hvd.checkpoint.reading.files import read_listed
from edl_hvd.checkpoint.retention.policy import Facts, Pruning, RetentionPolicy, best_of, milestones, plan, plan_for
from edl_hvd.checkpoint.tools.inspection import verify_each
from edl_hvd.errors import SettingsError, StorageError, UsageError
from edl_hvd.events import CheckpointWritten, Event
from edl_hvd.settings import Settings
from edl_hvd.storage import Storage, StoredObject, open_storage
from edl_hvd.values import Best, Interval


def quiet(done: int, whole: int) -> None:
    """Nobody watches."""


def objects(*keys: str) -> list[StoredObject]:
    return [StoredObject(key, 1) for key in keys]


def a_checkpoint(step: int, listed: bool = True) -> list[StoredObject]:
    shard = object_keys.folder(step) + object_keys.shard_name(0, 1)
    return objects(shard, *([object_keys.manifest_key(step)] if listed else []))


def facts_of(samples: int = 0, epochs: int = 0, **metrics: float) -> Facts:
    return Facts(samples, epochs, metrics, {})


def write_measured(storage: Storage, steps: Mapping[int, float], keep: RetentionPolicy) -> None:
    """Checkpoints in this order, each with its accuracy, by one writer."""
    writer = CheckpointWriter(storage, keep.newest, FakeClock(), keep_every=keep.every, keep_best=keep.best)
    for step, accuracy in steps.items():
        writer.begin(replace(snapshot_of(step), metrics={"accuracy": accuracy}), 0, 1, uuid.uuid4().hex)
        assert writer.wait(60)
        assert [type(event) for event in writer.poll()] == [CheckpointWritten]


# The newest

STEPS = st.dictionaries(st.integers(0, 20), st.booleans(), max_size=12)


@given(others=STEPS, broken=st.sets(st.integers(0, 20)), written=st.integers(0, 20), keep=st.integers(1, 5))
def test_the_newest_intact_ones_are_kept_and_stopping_nowhere_leaves_a_torn_one(
    others: dict[int, bool], broken: set[int], written: int, keep: int
) -> None:
    """``others`` maps steps to whether they are listed; ``broken`` are the damaged ones among them."""
    checkpoints = {**others, written: True}
    found = [entry for step, listed in checkpoints.items() for entry in a_checkpoint(step, listed)]
    keys = plan(Catalog.of(found), RetentionPolicy(keep), {}, lambda step: step not in broken, written).keys
    good = sorted((step for step in others if others[step] and step < written and step not in broken), reverse=True)
    kept = {written, *good[: keep - 1]}
    remaining = {entry.key for entry in found} - set(keys)
    for step in kept:
        assert {entry.key for entry in a_checkpoint(step)} <= remaining
    assert all(object_keys.step_of(key) < min(kept) for key in keys)
    assert {object_keys.step_of(key) for key in remaining} >= {step for step in checkpoints if step >= min(kept)}
    assert all(object_keys.step_of(key) >= min(kept) for key in remaining)
    manifests = {object_keys.manifest_key(step) for step in checkpoints}
    assert keys == sorted(keys, key=lambda key: key not in manifests), "a manifest goes before any shard"


@pytest.mark.parametrize("keep", [1, 3])
def test_there_is_room_for_one_more_than_are_kept_and_the_document_says_so(keep: int) -> None:
    """The oldest goes when the new one is whole, never before: else a job that dies between has one less."""
    storage = WatchedStorage()
    held: list[int] = []
    same = open_storage(storage.url)
    storage.watch = lambda method, key: held.append(len(steps(same)))
    write_measured(storage, dict.fromkeys(range(1, 7), 0.5), RetentionPolicy(keep))
    assert max(held) == keep + 1
    assert min(held[held.index(keep) :]) == keep, "no fewer, once there are as many"
    assert len(steps(same)) == keep
    document = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    assert "A checkpoint is written before an older one goes, so `keep_newest=3` needs room for four.\n" in document


def test_strangers_are_left_alone() -> None:
    strangers = objects("checkpoints/notes.txt", "checkpoints/1/manifest.json", "data/x", "checkpoints/best/a")
    catalog = Catalog.of(strangers + a_checkpoint(1) + a_checkpoint(2))
    assert plan(catalog, RetentionPolicy(1), {}, lambda step: True, written=2).keys == [
        object_keys.manifest_key(1),
        object_keys.folder(1) + object_keys.shard_name(0, 1),
    ]


def test_all_that_is_older_than_the_newest_goes() -> None:
    storage = WatchedStorage()
    write_rank(storage, snapshot_of(15), 1, 2, "dead")
    storage.write("checkpoints/notes.txt", b"mine")
    for step in (10, 20, 30, 40):
        write(storage, snapshot_of(step), size=2, keep=2)
    assert steps(storage) == [40, 30]
    assert {object_keys.step_of(entry.key) for entry in storage.list()} == {None, 30, 40}
    assert storage.read("checkpoints/notes.txt") == b"mine"


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one() -> None:
    storage = WatchedStorage()
    for step in (10, 20, 30):
        write(storage, snapshot_of(step), keep=3)
    shard = object_keys.folder(20) + object_keys.shard_name(0, 1)
    storage.write(shard, storage.read(shard)[:-1])
    storage.delete(object_keys.folder(30) + object_keys.shard_name(0, 1))
    write(storage, snapshot_of(40), keep=2)
    assert_equal(restore(storage, 10), snapshot_of(10))
    assert_equal(restore_newest(storage, nothing_reported), snapshot_of(40))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_job_that_went_back_behind_damaged_checkpoints_keeps_what_it_writes(keep: int) -> None:
    storage = WatchedStorage()
    for step in (10, 80, 90, 100):
        write(storage, snapshot_of(step), keep=9)
    for step in (90, 100):
        storage.delete(object_keys.folder(step) + object_keys.shard_name(0, 1))
    write(storage, snapshot_of(85), keep=keep)
    damaged: list[Event] = []
    assert_equal(restore_newest(storage, damaged.append), snapshot_of(85))
    assert len(damaged) == 2


def test_a_checkpoint_stands_even_if_old_ones_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    def no_delete(method: str, key: str) -> None:
        if method == "delete":
            raise StorageError("access denied")

    storage = WatchedStorage()
    write(storage, snapshot_of(10), keep=1)
    storage.watch = no_delete
    with caplog.at_level(logging.WARNING):
        events = write(storage, snapshot_of(20), keep=1)
    assert [type(event) for event in events[0]] == [CheckpointWritten]
    assert "cannot remove old checkpoints, the next checkpoint tries again: access denied" in caplog.text
    storage.watch = lambda method, key: None
    write(storage, snapshot_of(30), keep=1)
    assert steps(storage) == [30]


# Milestones


@given(st.sets(st.integers(0, 300)), st.integers(1, 60))
def test_a_milestone_is_the_first_checkpoint_at_or_after_a_multiple_and_before_the_next(
    positions: set[int], every: int
) -> None:
    between = [
        [position for position in positions if first <= position < first + every] for first in range(every, 301, every)
    ]
    found = milestones({step: step for step in positions}, every)
    assert found == {min(some) for some in between if some}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, Facts]], list[bool]]:
    """Checkpoints as a job writes them, which may go back to an older one; and after which of them it tidies up."""
    written, step = [], 0
    for _ in range(draw(st.integers(1, 15))):
        back = draw(st.integers(0, 9)) == 0
        step = draw(st.integers(0, step)) if back else step + draw(st.integers(1, 30))
        accuracy = draw(st.sampled_from([0.1, 0.5, 0.9, math.nan]))
        written.append((step, facts_of(step * 32, step // 10, accuracy=accuracy)))
    return written, [draw(st.booleans()) for _ in written]


KEEPS = st.builds(
    RetentionPolicy,
    st.integers(1, 3),
    st.sampled_from([None, "20 steps", "640 samples", "2 epochs"]).map(lambda text: text and Interval.parse(text)),
    st.sampled_from([None, Best("accuracy", "max"), Best("accuracy", "min")]),
)


@settings(max_examples=500)
@given(histories(), KEEPS)
def test_what_stays_does_not_depend_on_when_the_others_were_removed(
    history: tuple[list[tuple[int, Facts]], list[bool]], keep: RetentionPolicy
) -> None:
    written, tidies = history

    def last_plan(tidies: list[bool]) -> Pruning:
        there: dict[int, Facts] = {}
        for (step, facts), tidy in zip(written, [*tidies[:-1], True], strict=True):
            there[step] = facts
            if tidy:
                catalog = Catalog.of(entry for step in there for entry in a_checkpoint(step))
                found = plan(catalog, keep, there, lambda step: True, step)
                there = {step: facts for step, facts in there.items() if step not in found.removed}
        return found

    # One that was removed and comes again, after the job went back, would be another one.
    steps_written = [step for step, _ in written]
    assume(len(set(steps_written)) == len(steps_written))
    sometimes, always, once = (last_plan(when) for when in (tidies, [True] * len(tidies), [False] * len(tidies)))
    assert sometimes.milestones == always.milestones == once.milestones
    assert sometimes.best == always.best == once.best
    if steps_written == sorted(steps_written):
        assert sometimes.kept == always.kept == once.kept


@given(histories(), KEEPS)
def test_whatever_is_kept_keeps_all_its_objects_and_everything_else_that_is_older_goes(
    history: tuple[list[tuple[int, Facts]], list[bool]], keep: RetentionPolicy
) -> None:
    facts = dict(history[0])
    catalog = Catalog.of(entry for step in facts for entry in a_checkpoint(step))
    found = plan(catalog, keep, facts, lambda step: step % 7 > 0)
    stay = {*found.kept, *found.spared, *found.milestones, *([] if found.best is None else [found.best])}
    assert sorted(stay | set(found.removed), reverse=True) == catalog.steps
    assert stay.isdisjoint(found.removed)
    assert {object_keys.step_of(key) for key in found.keys} == set(found.removed)
    assert not found.removed or max(found.removed) < min(found.kept)


def test_a_job_keeps_milestones_and_the_best_beside_the_newest() -> None:
    storage = WatchedStorage()
    keep = RetentionPolicy(2, Interval(100, "steps"), Best("accuracy", "max"))
    accuracies = {40: 0.2, 90: 0.9, 130: 0.5, 160: 0.6, 250: 0.9, 280: math.nan, 330: 0.7, 360: 0.8, 380: 0.8}
    write_measured(storage, accuracies, keep)
    assert steps(storage) == [380, 360, 330, 250, 130, 90]
    assert {object_keys.step_of(entry.key) for entry in storage.list()} == set(steps(storage))
    assert not any(found.damaged for found in verify_each(storage, steps(storage), quiet))
    found = plan_for(storage, keep)
    assert (found.kept, found.milestones, found.best, found.keys) == ([380, 360], [330, 250, 130], 90, [])
    assert plan_for(storage, RetentionPolicy(2)).removed == [330, 250, 130, 90]


def test_another_worker_that_becomes_rank_0_knows_the_best_from_the_manifests() -> None:
    storage = WatchedStorage()
    keep = RetentionPolicy(1, None, Best("accuracy", "max"))
    for step, accuracy in {10: 0.5, 20: 0.9, 30: 0.6, 40: 0.7}.items():
        write_measured(storage, {step: accuracy}, keep)
    assert steps(storage) == [40, 20]
    assert dict(read_listed(storage, 20).manifest.metrics) == {"accuracy": 0.9}


def test_a_manifest_is_read_once_for_what_it_says_however_many_milestones_there_are() -> None:
    reads: list[str] = []
    storage = WatchedStorage(lambda method, key: reads.append(key) if method == "read" else None)
    write_measured(storage, dict.fromkeys(range(10, 200, 10), 0.5), RetentionPolicy(1, Interval(10, "steps")))
    assert len(steps(storage)) == 19
    assert len(reads) == len(set(reads)) == 19


# The best

ALWAYS: Callable[[int], bool] = lambda step: True  # noqa: E731


@pytest.mark.parametrize(
    ("metrics", "best", "expected"),
    [
        ({10: 0.5, 20: 0.9, 30: 0.7}, "accuracy:max", 20),
        ({10: 0.5, 20: 0.9, 30: 0.7}, "accuracy:min", 10),
        ({10: math.nan, 20: -math.inf, 30: 0.7}, "accuracy:max", 30),
        ({10: math.nan, 20: math.inf}, "accuracy:min", 20),
        ({10: math.nan}, "accuracy:max", None),
        ({10: 0.9, 20: 0.9}, "accuracy:max", 10),
        ({10: -0.0, 20: 0.0}, "accuracy:max", 10),
        ({10: 0.9}, "loss:min", None),
        ({}, "loss:min", None),
    ],
)
def test_the_best_is_the_oldest_with_the_best_number(metrics: dict[int, float], best: str, expected: int) -> None:
    facts = {step: facts_of(accuracy=value) for step, value in metrics.items()}
    assert best_of(facts, Best.parse(best), ALWAYS) == expected
    assert best_of({**facts, 99: facts_of()}, Best.parse(best), ALWAYS) == expected


def test_a_damaged_checkpoint_is_not_the_best() -> None:
    storage = WatchedStorage()
    keep = RetentionPolicy(1, None, Best("accuracy", "max"))
    write_measured(storage, {10: 0.5, 20: 0.9}, replace(keep, newest=9))
    storage.delete(object_keys.folder(20) + object_keys.shard_name(0, 1))
    write_measured(storage, {30: 0.4}, keep)
    assert steps(storage) == [30, 10]


def test_a_metric_that_no_checkpoint_has_removes_nothing_by_hand_and_is_told_by_a_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = WatchedStorage()
    misspelt = RetentionPolicy(1, None, Best("acuracy", "max"))
    with caplog.at_level(logging.WARNING):
        write_measured(storage, {10: 0.5, 20: 0.9, 30: 0.4}, misspelt)
    words = "none has the metric 'acuracy'; those there are: accuracy"
    assert caplog.text.count(words) == 1
    with pytest.raises(UsageError, match=f"cannot keep the best checkpoint in {storage.url}: {words}"):
        plan_for(storage, misspelt)


# As settings


@pytest.mark.parametrize("text", ["5 epochs", "100 steps", "1 sample", "2 EPOCHS"])
def test_milestones_are_counted_in_what_checkpoints_are_numbered_by(text: str) -> None:
    assert Settings.from_environment({"EDL_HVD_KEEP_EVERY": text}).keep_every == Interval.parse(text)
    assert Settings.from_environment({"EDL_HVD_KEEP_EVERY": "7 steps"}, keep_every=text).keep_every == Interval.parse(
        text
    )


@pytest.mark.parametrize("value", ["10min", "100", 100, "auto", "0.5 epochs", "0 steps", "-1 steps", "epoch", True])
def test_other_milestones_are_refused(value: object) -> None:
    with pytest.raises(SettingsError, match=r"keep_every: checkpoints are not numbered by .*'10000 steps', '1000000"):
        Settings.from_environment({}, keep_every=value)
    with pytest.raises(SettingsError, match=r"EDL_HVD_KEEP_EVERY=.*: checkpoints are not numbered by"):
        Settings.from_environment({"EDL_HVD_KEEP_EVERY": str(value)})


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("accuracy:max", Best("accuracy", "max")),
        (" val/loss : min ", Best("val/loss", "min")),
        ("a:b:max", Best("a:b", "max")),
    ],
)
def test_the_best_is_a_metric_and_which_of_its_values_is_best(text: str, best: Best) -> None:
    assert Settings.from_environment({"EDL_HVD_KEEP_BEST": text}).keep_best == best
    assert Settings.from_environment({}, keep_best=text).keep_best == best
    assert Best.parse(str(best)) == best


@pytest.mark.parametrize("value", ["accuracy", "-loss", "loss:lowest", ":min", " :max", "loss min", "loss:", 3])
def test_which_values_are_better_is_never_guessed(value: object) -> None:
    with pytest.raises(SettingsError, match=r"keep_best: .* does not say which .*'loss:min' or 'accuracy:max'"):
        Settings.from_environment({}, keep_best=value)
    with pytest.raises(SettingsError, match=r"EDL_HVD_KEEP_BEST=.* does not say which"):
        Settings.from_environment({"EDL_HVD_KEEP_BEST": str(value)})
