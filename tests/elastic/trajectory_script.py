"""Trains a small ResNet with BatchNorm, dropout and augmentation on handwritten digits; notes what every step saw.

Runs under any launcher and without one. A line "loss" of the trace is one micro-batch: its place, its samples' indices,
a checksum of its augmented images, and its loss.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from faults import Points
from training import Training

CLASSES = 10


def main(folder: Path) -> None:
    from edl_hvd.errors import WorldBrokenError

    points = Points(folder, lambda: WorldBrokenError)
    points.note("start")

    import torch
    from torch import nn

    import edl_hvd
    from edl_hvd.worker.codec import encode

    torch.set_num_threads(1)
    training = Training.load(folder)
    edl_hvd.init()
    torch.manual_seed(11)
    model = small_resnet(nn, nn.ReLU if "relu" in training.extra else nn.SiLU)
    optimizer = edl_hvd.DistributedOptimizer(
        make_optimizer(torch, training, model), model.named_parameters(), exact="exact" in training.extra
    )
    images, labels = digits(training.samples)
    batches = edl_hvd.ElasticBatchSampler(
        training.samples, global_batch=training.global_batch, micro_batch=training.micro_batch, seed=4
    )
    loader = torch.utils.data.DataLoader(
        edl_hvd.SeededDataset(Augmented(images, labels)), batch_sampler=batches, num_workers=training.loader_workers
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

    @edl_hvd.elastic
    def train(state: Any) -> None:
        points.rank, points.size, points.step = edl_hvd.rank(), edl_hvd.size(), state.step
        points.note("enter", rank=points.rank, size=points.size, step=state.step, generation=state.generation)
        for epoch in state.epochs(10**6):
            mine = epoch >= training.epochs and batches.offset == 0 and points.over(training.linger_s)
            mine = mine and training.until_size in (None, points.size)
            if edl_hvd.allreduce(torch.tensor(int(mine)), op="min").item():
                return
            for index, pixels, label in state.batches(loader):
                points.step = state.step
                points.note("step", step=state.step, rank=points.rank, size=points.size)
                points.reach("step")
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled="half" in training.extra):
                    output = model(pixels)
                loss = nn.functional.cross_entropy(output.float(), label)
                loss.backward()
                points.reach("reduced")
                optimizer.step()
                points.reach("update")
                points.note(
                    "loss", step=state.step, samples=index.tolist(), pixels=zlib.crc32(pixels.numpy().tobytes()),
                    loss=loss.item(),
                )  # fmt: skip
                if optimizer.at_boundary:
                    time.sleep(training.pause_s)
            scheduler.step()

    train(state)
    digest = hashlib.sha256()
    for part in (model.state_dict(), optimizer.state_dict()):
        for name, tensor in sorted(encode(part, "")[1].items()):
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    report = {"rank": edl_hvd.rank(), "size": edl_hvd.size(), "step": state.step, "epoch": state.epoch,
              "sha256": digest.hexdigest()}  # fmt: skip
    (folder / "reports").mkdir(exist_ok=True)
    (folder / "reports" / f"{points.worker.replace(':', '.')}.json").write_text(json.dumps(report))


def digits(samples: int) -> tuple[Any, Any]:
    """Images of 1 × 8 × 8 pixels in [0, 1], and their labels."""
    import torch
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images[:samples], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target[:samples])


class Augmented:
    """Each image shifted by up to one pixel each way, with noise from torch, ``random`` and NumPy."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        import random

        import numpy
        import torch

        image = torch.roll(
            self.images[index], shifts=(random.randint(-1, 1), int(numpy.random.randint(-1, 2))), dims=(1, 2)
        )
        return index, image + 0.1 * torch.randn(image.shape), self.labels[index]


def make_optimizer(torch: Any, training: Training, model: Any) -> Any:
    if training.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=2e-3)
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)


def small_resnet(nn: Any, activation: Any) -> Any:
    """Two residual blocks with BatchNorm, and dropout before the last layer; 5,000 parameters."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inside = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )  # fmt: skip

        def forward(self, images: Any) -> Any:
            return activation()(images + self.inside(images))

    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), activation(),
        Block(12), nn.AvgPool2d(2), Block(12),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, CLASSES),
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
