"""Top-1 and top-5 accuracy on the whole validation set, shared out over the world."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import edl_hvd

BATCH_SIZE = 64  # small enough for any GPU that can train the same model


@dataclass(frozen=True)
class Accuracy:
    """What a validation found.

    Attributes:
        top1, top5: Share of images whose class is the model's first guess, among its first five; in [0, 1].
        loss: Mean cross-entropy.
        images: Images validated, each once.
    """

    top1: float
    top5: float
    loss: float
    images: int

    def __str__(self) -> str:
        return f"top-1 {self.top1:.2%} · top-5 {self.top5:.2%} on {self.images:,} images"


@torch.no_grad()
def validate(model: torch.nn.Module, dataset: Dataset, autocast: torch.autocast, arguments: Namespace) -> Accuracy:
    """Validate ``model`` on ``dataset``. Collective: every rank calls it, every rank gets the same answer.

    Rank r of n takes the images r, r + n, r + 2n, …: each image counts once, and no rank pads its share. With
    ``--limit-batches`` it is a sample, spread evenly over the classes.
    """
    stride = 1
    if arguments.limit_batches is not None:
        batch = arguments.global_batch or arguments.worker_batch
        stride = math.ceil(len(dataset) / (arguments.limit_batches * batch))
    share = Subset(dataset, range(len(dataset))[::stride][edl_hvd.rank() :: edl_hvd.size()])
    device = edl_hvd.device()
    loader = DataLoader(share, BATCH_SIZE, num_workers=arguments.workers, pin_memory=device.type == "cuda")
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # a float32 stops counting at 2**24
    model.eval()
    for images, target in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)
        with autocast:
            output = model(images)
        guesses = output.topk(min(5, output.shape[1])).indices
        hits = guesses == target[:, None]
        loss = F.cross_entropy(output.float(), target, reduction="sum")
        totals += torch.stack([hits[:, 0].sum(), hits.sum(), loss, torch.tensor(len(target), device=device)])
    top1, top5, loss, count = edl_hvd.allreduce(totals, op="sum").tolist()
    return Accuracy(top1 / count, top5 / count, loss / count, int(count))
