"""What the student of ``digits.py`` gains from its teacher, over several seeds: plain loops in one process.

Each seed chooses the 200 of 1,257 images that keep their label, the student's first weights and the order of the
batches. The student with a teacher and the one without begin alike and make the same number of steps; the one without
sees the 200 images as often as that takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from common import (
    GLOBAL_BATCH,
    LABELLED,
    LEARNING_RATE,
    TEMPERATURE,
    TRAINING,
    WEIGHT,
    accuracy,
    all_digits,
    make_student,
)
from torch.nn.functional import cross_entropy

from edl_hvd import distill


def learn(answers: torch.Tensor | None, seed: int, epochs: int, temperature: float = TEMPERATURE) -> float:
    """The accuracy of a student.

    Args:
        answers: The teacher's answers to all images; ``None``: the student learns from labels alone.
        seed: Seed of all that is drawn.
        epochs: Number of epochs of the student with a teacher, whose steps are counted.
        temperature: Temperature of the distillation.
    """
    images, targets = all_digits()
    generator = torch.Generator().manual_seed(seed)
    labelled = torch.randperm(TRAINING, generator=generator)[:LABELLED]
    known = torch.full_like(targets, -1)
    known[labelled] = targets[labelled]
    student = make_student(seed)
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE)
    steps = epochs * -(-TRAINING // GLOBAL_BATCH)
    for part in _batches(labelled if answers is None else torch.arange(TRAINING), steps, generator):
        logits = student(images[part])
        if answers is None:
            loss = cross_entropy(logits, known[part])
        else:
            loss = distill.distillation_loss(logits, answers[part], known[part], temperature=temperature, weight=WEIGHT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return accuracy(student.eval(), images[TRAINING:], targets[TRAINING:])


def _batches(indices: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """A number of batches of these, in an order that is new in each epoch."""
    while True:
        for part in indices[torch.randperm(len(indices), generator=generator)].split(GLOBAL_BATCH):
            if not steps:
                return
            steps -= 1
            yield part


@torch.no_grad()
def answers_of(teacher: torch.nn.Module) -> torch.Tensor:
    """The teacher's answers to all images."""
    return teacher.eval()(all_digits()[0])


def show(shares: Sequence[float]) -> str:
    """Mean and standard deviation, in percent.

    >>> show([0.5, 0.52])
    '51.00 ± 1.41'
    """
    return f"{100 * statistics.mean(shares):.2f} ± {100 * statistics.stdev(shares):.2f}"
