"""Top-1 and top-5 accuracy on the whole validation set, shared out over the world."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import edl_hvd
from edl_hvd.metrics import Accuracy, Mean

BATCH_SIZE = 64  # small enough for any GPU that can train the same model


class Validation:
    """Accuracy of a model on a validation set.

    With ``--limit-batches`` it uses a sample of the images, spread evenly over the classes.

    Args:
        dataset: Images and classes to validate on.
        classes: Number of classes.
        arguments: Arguments of the command line.

    Attributes:
        kept: Objects for ``State`` to keep, by name.
        top1, top5: Fraction of images whose class is the model's first guess, or among its first five.
        loss: Mean cross-entropy.
    """

    def __init__(self, dataset: Dataset, classes: int, arguments: Namespace) -> None:
        stride = 1
        if arguments.limit_batches is not None:
            batch = arguments.global_batch or arguments.worker_batch
            stride = math.ceil(len(dataset) / (arguments.limit_batches * batch))
        images = Subset(dataset, range(0, len(dataset), stride))
        batches = edl_hvd.EvaluationSampler(len(images), BATCH_SIZE)
        self._device = edl_hvd.device()
        self._loader = DataLoader(
            images, batch_sampler=batches, num_workers=arguments.workers, pin_memory=self._device.type == "cuda"
        )
        self.top1, self.top5, self.loss = Accuracy(), Accuracy(top_k=min(5, classes)), Mean()
        self.kept: dict[str, Any] = {"val_batches": batches, "top1": self.top1, "top5": self.top5, "loss": self.loss}

    @torch.no_grad()
    def run(self, state: edl_hvd.State, autocast: torch.autocast) -> None:
        """Validate the model of ``state``. Every rank calls it and gets the same result, also after an interruption."""
        state.model.eval()
        for images, target in state.evaluate(self._loader):
            images = images.to(self._device, non_blocking=True, memory_format=torch.channels_last)
            target = target.to(self._device, non_blocking=True)
            with autocast:
                output = state.model(images)
            self.top1.update(output, target)
            self.top5.update(output, target)
            self.loss.update(F.cross_entropy(output.float(), target, reduction="none"))

    def __str__(self) -> str:
        shares = f"top-1 {self.top1.compute():.2%} · top-5 {self.top5.compute():.2%}"
        return f"{shares} on {self.top1.samples:,} images"
