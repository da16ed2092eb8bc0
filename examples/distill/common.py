"""What the teacher, the student and the plain script share: handwritten digits, three CNNs, and a small network.

scikit-learn ships the 1,797 images, so nothing is downloaded. The last 540 are for testing: other people wrote them.
Of the 1,257 others only 200 keep their label for the student; the teacher has learned from all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

LABELLED, TRAINING = 200, 1257
GLOBAL_BATCH, MICRO_BATCH = 64, 32
TEMPERATURE, WEIGHT, LEARNING_RATE = 4.0, 0.9, 0.01
CNNS, TEACHER_EPOCHS = 3, 12
TEACHER = Path("runs/distill/cnns.pt")


def all_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images and their targets, those for testing last."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The training set, whose images without a label have target -1, in a fixed order; test images; their targets."""
    images, targets = all_digits()
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(0))
    known = targets[:TRAINING][order].clone()
    known[LABELLED:] = -1
    mixed = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images[:TRAINING][order][mixed], known[mixed]), images[TRAINING:], targets[TRAINING:]


def make_student(seed: int = 0) -> torch.nn.Module:
    """A network with one hidden layer of 16."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )  # fmt: skip


class Average(torch.nn.Module):
    """Several models as one teacher, which answers with the mean of their logits."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The mean."""
        return torch.stack([model(images) for model in self.models]).mean(0)


def make_cnn(seed: int) -> torch.nn.Module:
    """A CNN, before training."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(1024, 10),
    )  # fmt: skip


def train_cnn(seed: int, epochs: int) -> torch.nn.Module:
    """A CNN that has learned from all labels of the training set."""
    images, targets = all_digits()
    model = make_cnn(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _ in range(epochs):
        for part in torch.randperm(TRAINING).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[part]), targets[part]).backward()
            optimizer.step()
    return model


def train_teacher(path: Path = TEACHER, epochs: int = TEACHER_EPOCHS) -> torch.nn.Module:
    """The trained CNNs, averaged; the first call trains them, in some ten seconds, and later ones read their file."""
    if path.exists():
        model = Average(make_cnn(seed) for seed in range(1, CNNS + 1))
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    model = Average(train_cnn(seed, epochs) for seed in range(1, CNNS + 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two teachers that are started at once train the same weights, each for itself.
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(path)
    return model


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of images whose digit the model names."""
    return float((model(images).argmax(1) == targets).float().mean())
