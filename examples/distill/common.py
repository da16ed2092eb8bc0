"""What the teacher, the student and the plain script share: handwritten digits, a CNN, and a small network.

scikit-learn ships the 1,797 images, so nothing is downloaded. The last 540 are for testing: other people wrote them.
Of the 1,257 others only 200 keep their label for the student; the teacher has learned from all of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

LABELLED, TRAINING = 200, 1257
GLOBAL_BATCH, MICRO_BATCH = 64, 32
TEMPERATURE, WEIGHT, LEARNING_RATE = 2.0, 0.9, 0.01
TEACHER = Path("runs/distill/teacher.pt")


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The training set, whose images without a label have target -1, in a fixed order; test images; their targets."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(data.target)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(0))
    known = targets[:TRAINING][order].clone()
    known[LABELLED:] = -1
    mixed = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images[:TRAINING][order][mixed], known[mixed]), images[TRAINING:], targets[TRAINING:]


def make_student() -> torch.nn.Module:
    """A network with one hidden layer of 16."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )  # fmt: skip


def make_teacher() -> torch.nn.Module:
    """A CNN, before training."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(1024, 10),
    )  # fmt: skip


def train_teacher(path: Path = TEACHER, epochs: int = 12) -> torch.nn.Module:
    """The trained CNN; it is trained by the first call, in some seconds, and read from its file by later ones."""
    model = make_teacher()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    data = load_digits()
    images = torch.tensor(data.images[:TRAINING], dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(data.target[:TRAINING])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _ in range(epochs):
        for part in torch.randperm(TRAINING).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[part]), targets[part]).backward()
            optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(path)
    return model


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of images whose digit the model names."""
    return float((model(images).argmax(1) == targets).float().mean())
