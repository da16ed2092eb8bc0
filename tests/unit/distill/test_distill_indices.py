"""Indices travel, and the teacher reads what the student has read: the same samples with the same augmentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleet import Images, fleet, sums
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.distill import DistillLoader, Indices, OnIndices, Teachers
from edl_hvd.errors import UsageError

LENGTH = 62


class Noisy(Images):
    """Images with an augmentation, and perhaps another one than the student's."""

    def __init__(self, length: int, by: float = 1.0) -> None:
        super().__init__(length)
        self.by = by

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return image + self.by * torch.rand(1), label


class Model(torch.nn.Module):
    """A module whose answers anybody can check."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return sums(images) * self.scale


def first_of(batch: Any) -> torch.Tensor:
    return batch[0]


def teacher(by: float = 1.0, length: int = LENGTH) -> OnIndices:
    return OnIndices(Model(), edl_hvd.SeededDataset(Noisy(length, by)), send=first_of)


def make_loader(
    teachers: Teachers, send: Any = None, order: Any = None, keep: Any = None, micro_batch: int = 4
) -> DistillLoader:
    batches = edl_hvd.ElasticBatchSampler(LENGTH, global_batch=8, micro_batch=micro_batch, seed=3, order=order)
    inner = DataLoader(edl_hvd.SeededDataset(Noisy(LENGTH), views=2), batch_sampler=batches)
    return DistillLoader(inner, teachers, send=send or Indices(check=first_of), keep=keep)


def check(loader: DistillLoader, epoch: int) -> None:
    loader.batch_sampler.set_epoch(epoch)
    count = 0
    for images, _, answer in loader:
        assert torch.equal(answer, sums(images))
        count += len(images)
    assert count == LENGTH


@pytest.mark.distill
@pytest.mark.parametrize("is_exact", [False, True])
def test_the_teacher_sees_what_the_student_sees(tmp_path, is_exact):
    with fleet(tmp_path, teacher(), teacher(), max_batch=64) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, exact=is_exact)
        loader = make_loader(wanted)
        check(loader, 0)
        check(loader, 1)
        calls = list(loader._open.service.calling._calls.values())
        sent = sum(call.stream.sent_bytes for call in calls)
        assert sent < 2 * LENGTH * 48 + 40_000, "48 bytes for each sample, and the headers"
        loader.close()
        # With replacement: a sample that is drawn twice has another augmentation each time.
        drawn = make_loader(wanted, order=edl_hvd.WeightedOrder([1.0] * 8 + [0.0] * (LENGTH - 8), draws=LENGTH))
        check(drawn, 0)
        drawn.close()


@pytest.mark.distill
def test_a_teacher_with_other_data_is_told_and_named(tmp_path):
    with fleet(tmp_path, teacher(by=2.0), teacher(by=2.0)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        with pytest.raises(UsageError, match=r"sample \d+ of epoch 0 has other bits in the teacher's data set than in"):
            check(loader, 0)
        loader.close()
    with fleet(tmp_path, teacher(length=8), teacher(length=8)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        with pytest.raises(UsageError, match=r"was asked for, and the teacher's data set has 8"):
            check(loader, 0)
        loader.close()


def test_kept_answers_are_found_by_the_inputs_and_not_by_the_place(tmp_path):
    model = teacher()
    calls = 0

    def count(module: Any, given: Any) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_pre_hook(count)
    # The teacher's data set has no views: so the epochs are 0 and 1, and then those again, by the check.
    checks = 6  # of a model that answers, once in a pass
    for epoch, expected in ((0, 8 + checks), (0, 8 + checks), (1, 24 + 2 * checks), (1, 24 + 2 * checks)):
        loader = make_loader(Teachers(local=lambda: model), keep=tmp_path, micro_batch=4 if epoch else 8)
        check(loader, epoch)
        loader.close()
        assert calls <= expected
    with pytest.raises(UsageError, match=r"send=Indices\(\) sends none; give Indices\(check=…\)"):
        check(make_loader(Teachers(local=lambda: model), send=Indices(), keep=tmp_path), 0)


def test_what_may_not_be_is_said():
    model = teacher()
    inner = DataLoader(Noisy(LENGTH), batch_size=4)
    with pytest.raises(UsageError, match=r"expected a loader whose batch_sampler is an ElasticBatchSampler"):
        next(iter(DistillLoader(inner, Teachers(local=lambda: model), send=Indices())))
    with pytest.raises(UsageError, match=r"this teacher reads its inputs itself; give the students' DistillLoader"):
        model(torch.zeros(2, 1, 4, 4))
    several = {"a": Teachers(local=lambda: model), "b": Teachers(local=lambda: model)}
    with pytest.raises(UsageError, match=r"route= sends each teacher a part of the batch"):
        DistillLoader(inner, several, send=Indices(), route=lambda batch: ["a"] * 4)
