"""What a student gains from a teacher where labels are scarce: digits with 200 labels, over several seeds.

    python benchmarks/distill_digits.py                     10 seeds: about three minutes

Each seed chooses the 200 of 1,257 images that keep their label, the student's first weights and the order of the
batches; the student with a teacher and the one without begin alike and make the same number of steps. The one without
sees the 200 images in each epoch as often as it takes. Data, networks and numbers are those of the example
(``examples/distill/common.py``); the last 540 images, which other people wrote, are for testing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from edl_hvd import distill

sys.path += [str(Path(__file__).parents[1] / "examples" / "distill")]
from common import GLOBAL_BATCH, LABELLED, LEARNING_RATE, TRAINING, WEIGHT, accuracy, make_teacher, train_teacher
from sklearn.datasets import load_digits


@dataclass(frozen=True)
class Digits:
    """The images and their digits."""

    images: torch.Tensor
    targets: torch.Tensor
    test_images: torch.Tensor
    test_targets: torch.Tensor


def load() -> Digits:
    """All of them."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(data.target)
    return Digits(images[:TRAINING], targets[:TRAINING], images[TRAINING:], targets[TRAINING:])


class Mean(torch.nn.Module):
    """Several teachers, whose logits are averaged."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(images) for model in self.models]).mean(0)


def teachers(digits: Digits, epochs: int) -> dict[str, torch.nn.Module]:
    """The example's teacher, and three that have learned for longer."""
    with tempfile.TemporaryDirectory() as folder:
        one = train_teacher(Path(folder) / "teacher.pt").eval()
    models = []
    for seed in range(3):
        model = make_teacher()
        torch.manual_seed(seed + 1)
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        for _ in range(epochs):
            for part in torch.randperm(TRAINING).split(GLOBAL_BATCH):
                optimizer.zero_grad()
                cross_entropy(model(digits.images[part]), digits.targets[part]).backward()
                optimizer.step()
        models.append(model.eval())
    return {"the example's": one, "three": Mean(models).eval()}


def make_student(seed: int) -> torch.nn.Module:
    """The example's student, with other first weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )  # fmt: skip


def batches(indices: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """So many batches of these, in an order that is new in each epoch."""
    while True:
        for part in indices[torch.randperm(len(indices), generator=generator)].split(GLOBAL_BATCH):
            if not steps:
                return
            steps -= 1
            yield part


def learn(digits: Digits, answers: torch.Tensor | None, seed: int, epochs: int, temperature: float) -> float:
    """The accuracy of a student; ``answers`` are the teacher's, ``None`` for labels alone."""
    generator = torch.Generator().manual_seed(seed)
    labelled = torch.randperm(TRAINING, generator=generator)[:LABELLED]
    known = torch.full_like(digits.targets, -1)
    known[labelled] = digits.targets[labelled]
    student = make_student(seed)
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE)
    steps = epochs * -(-TRAINING // GLOBAL_BATCH)
    for part in batches(labelled if answers is None else torch.arange(TRAINING), steps, generator):
        logits = student(digits.images[part])
        if answers is None:
            loss = cross_entropy(logits, known[part])
        else:
            loss = distill.distillation_loss(logits, answers[part], known[part], temperature=temperature, weight=WEIGHT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return accuracy(student.eval(), digits.test_images, digits.test_targets)


def show(values: list[float]) -> str:
    """Mean and standard deviation of percentages."""
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def main() -> None:
    """Train all students and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--teacher-epochs", type=int, default=40, help="of the three teachers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    digits = load()
    models = teachers(digits, arguments.teacher_epochs)
    with torch.no_grad():
        answers = {name: model(digits.images) for name, model in models.items()}
    for name, model in models.items():
        print(f"{name}: {accuracy(model, digits.test_images, digits.test_targets):.2%} of the test images")
    print("\n| teacher | epochs | temperature | labels alone | with the teacher | gain, points | least | most |")
    print("|---|---|---|---|---|---|---|---|")
    for epochs in (30, 90):
        alone = [learn(digits, None, seed, epochs, 1.0) for seed in range(arguments.seeds)]
        for name in models:
            for temperature in (2.0, 4.0):
                taught = [learn(digits, answers[name], seed, epochs, temperature) for seed in range(arguments.seeds)]
                gains = [with_it - without for with_it, without in zip(taught, alone, strict=True)]
                print(
                    f"| {name} | {epochs} | {temperature:g} | {show(alone)} | {show(taught)} | {show(gains)} "
                    f"| {100 * min(gains):.2f} | {100 * max(gains):.2f} |",
                    flush=True,
                )
    print(f"\n{arguments.seeds} seeds; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
