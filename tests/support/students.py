"""Students for tests: a loader of images whose answers anybody can check, and an epoch that checks them."""

from __future__ import annotations

import torch
from fleet import Images, sums
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers

TOKEN = "a-token-of-sufficient-length"


def sampler(length: int, seed: int = 3) -> edl_hvd.ElasticBatchSampler:
    return edl_hvd.ElasticBatchSampler(length, global_batch=8, micro_batch=4, seed=seed)


def make_loader(teachers: Teachers, length: int = 64, workers: int = 0, side: int = 4, dataset=None) -> DistillLoader:
    dataset = dataset or Images(length, side)
    inner = DataLoader(dataset, batch_sampler=sampler(length), num_workers=workers)
    return DistillLoader(inner, teachers, send=lambda batch: batch[0])


def check(loader: DistillLoader, length: int = 64, struck=lambda number: None) -> None:
    """Go through an epoch: each sample once, in the sampler's order, each answer the right one."""
    seen = []
    for number, (images, index, answer) in enumerate(loader):
        assert torch.equal(answer, sums(images)), f"micro-batch {number}"
        seen += index.tolist()
        struck(number)
    assert seen == [index for indices in sampler(length) for index in indices]
