"""A student that waits for an answer learns that its world is to change."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from fleet import Images, Sums, fleet, sums
from torch.utils.data import DataLoader
from waiting import soon

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.errors import WorldBrokenError
from edl_hvd.world_change import world_change

pytestmark = pytest.mark.distill


def make_loader(source: str, port: int) -> DistillLoader:
    batches = edl_hvd.ElasticBatchSampler(16, global_batch=8, micro_batch=4, seed=7)
    inner = DataLoader(Images(16), batch_sampler=batches)
    return DistillLoader(inner, Teachers(source, port=port), send=lambda batch: batch[0])


def count_right(loader: DistillLoader) -> int:
    count = 0
    for images, _, answer in loader:
        assert torch.equal(answer, sums(images))
        count += len(images)
    return count


def test_a_wait_without_teachers_ends_when_the_world_is_to_change_and_the_next_pass_has_all(tmp_path: Path) -> None:
    with fleet(tmp_path) as teachers:
        teachers.list(1)
        loader = make_loader(teachers.source, teachers.port)
        with world_change.found_by(lambda: True), pytest.raises(WorldBrokenError, match="has waited for a teacher"):
            next(iter(loader))
        teachers.start(Sums(), 0)
        assert count_right(loader) == 16
        loader.close()


def test_answers_that_come_are_taken_before_the_world_changes(tmp_path: Path) -> None:
    """A world that is to change is left at a commit, and teachers that answer let the training come there."""
    with fleet(tmp_path, Sums(0.05)) as teachers:
        loader = make_loader(teachers.source, teachers.port)
        first = next(iter(loader))
        assert torch.equal(first[2], sums(first[0]))
        with world_change.found_by(lambda: True):
            assert count_right(loader) == 16
        loader.close()


def test_only_the_thread_of_the_script_leaves_its_world() -> None:
    """And only in an elastic function."""
    assert not world_change.is_pending()
    found: list[bool] = []
    with world_change.found_by(lambda: True):
        assert world_change.is_pending()
        other = threading.Thread(target=lambda: found.append(world_change.is_pending()))
        other.start()
        soon(other)
    assert found == [False]
    assert not world_change.is_pending()
