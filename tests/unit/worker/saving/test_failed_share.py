"""A rank that cannot write its share tells rank 0 over the world: the storage may be what does not take anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import WatchedStorage, snapshot_of
from fake_world import ThreadCollectives, together

from edl_hvd.errors import CheckpointFailedError, OwnedError, StorageError
from edl_hvd.events import EventLog, read_events
from edl_hvd.settings import Settings
from edl_hvd.worker.saving.manager import CheckpointManager
from edl_hvd.world import World


def refusing(method: str, key: str) -> None:
    if method.startswith("write"):
        raise StorageError(f"cannot write {key!r}: access denied")


def managers(monkeypatch: pytest.MonkeyPatch, storages: list[WatchedStorage], folder: Path) -> list[CheckpointManager]:
    """One for each rank, with its own view of the storage."""
    given = iter(storages)
    monkeypatch.setattr("edl_hvd.worker.saving.manager.open_storage", lambda url, memory_mb: next(given))
    settings = Settings(checkpoint="memory://of-a-test")
    return [CheckpointManager(settings, EventLog(str(folder / f"rank-{rank}.jsonl"))) for rank in range(len(storages))]


@pytest.mark.parametrize("is_last", [False, True], ids=["while training", "at the end"])
def test_rank_0_hears_at_once_why_another_ranks_share_does_not_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_last: bool
) -> None:
    common, denied = WatchedStorage(), WatchedStorage(refusing)
    denied._inner = common._inner
    ranks = managers(monkeypatch, [common, denied], tmp_path)

    def work(collectives: ThreadCollectives, world: World) -> None:
        manager = ranks[world.rank]
        manager.begin(snapshot_of(10), world, "attempt")
        collectives.gather_integers([world.rank])  # both have begun
        if is_last:
            manager.wait_for_writers(collectives, world)
            return
        assert ranks[1]._writer.wait(60)
        assert ranks[0].busy, "it waits for the share"
        manager.report()
        assert manager.has_failed == (world.rank == 1)
        manager.share_failure(collectives, world)
        assert not manager.has_failed
        assert manager._writer.wait(60)
        manager.report()

    assert together(2, work) == [None, None]
    [failed] = [event for event in read_events(str(tmp_path / "rank-0.jsonl")) if event["event"] == "checkpoint_failed"]
    assert failed["reason"].startswith("rank 1 could not write its share: cannot write ")
    assert "access denied" in failed["reason"]


@pytest.mark.parametrize(("taken_over", "kind"), [(True, OwnedError), (False, CheckpointFailedError)])
def test_a_job_that_was_taken_over_ends_with_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken_over: bool, kind: type[StorageError]
) -> None:
    ranks = managers(monkeypatch, [WatchedStorage(), WatchedStorage()], tmp_path)
    if taken_over:
        monkeypatch.setattr(type(ranks[0].lease), "lost", "another job has it")
    ranks[1]._failure = "a checkpoint failed"
    found = together(2, lambda collectives, world: ranks[world.rank].stop_job(collectives, world))
    assert [type(error) for error in found] == [kind, kind]
    assert len({str(error) for error in found}) == 1
