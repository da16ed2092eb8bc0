"""The student and the teacher of the demo: as in ``digits.py``, with times of an accelerator, and notes of each step.

    edl-hvd teach examples/distill/student.py:build
    edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/student.py --notes runs/notes

``EDL_HVD_DEMO_ANSWER_S`` is the time of the teacher's answer to 32 samples, and --work that of the student's
micro-batch. Both sleep for it, so that processes on the same cores do not take them from each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    MICRO_BATCH,
    TEMPERATURE,
    WEIGHT,
    accuracy,
    digits,
    make_student,
    train_teacher,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

import edl_hvd
from edl_hvd import distill


class SlowTeacher(torch.nn.Module):
    """A model that sleeps before it answers, the longer the more samples there are.

    Args:
        model: Model that answers.
        answer_s: Time for 32 samples.
    """

    def __init__(self, model: torch.nn.Module, answer_s: float) -> None:
        super().__init__()
        self.model, self.answer_s = model, answer_s

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's answer."""
        time.sleep(self.answer_s * len(images) / MICRO_BATCH)
        return self.model(images)


def build() -> torch.nn.Module:
    """The teacher, for ``edl-hvd teach`` and for a student that holds it in its own process."""
    torch.set_num_threads(1)
    return SlowTeacher(train_teacher(), float(os.environ.get("EDL_HVD_DEMO_ANSWER_S", "0")))


class Numbered(Dataset[Any]):
    """Items with their index."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        image, target = self.dataset[index]
        return image, target, index


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bits."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Train, and append to a file of --notes what each step has learned from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--notes", type=Path, required=True, help="folder for a file of each worker")
    parser.add_argument("--work", type=float, default=0.0, help="seconds of sleep per micro-batch")
    parser.add_argument("--labels-only", action="store_true", help="no teacher")
    parser.add_argument("--exact", action="store_true", help="answers and sums of the same bits in every world")
    parser.add_argument("--port", type=int, default=7010, help="of the first teacher of each host")
    arguments = parser.parse_args()
    edl_hvd.init()
    torch.set_num_threads(1)  # several workers share this machine
    arguments.notes.mkdir(parents=True, exist_ok=True)
    notes = open(arguments.notes / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - until the end

    def note(**fields: Any) -> None:
        notes.write(json.dumps({"at_s": time.time(), **fields}) + "\n")
        notes.flush()

    training, test_images, test_targets = digits()
    dataset = Numbered(training)
    model = make_student()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), model.named_parameters(), exact=arguments.exact
    )
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=1)
    loader: Any = DataLoader(dataset, batch_sampler=batches)
    if not arguments.labels_only:
        teachers = distill.Teachers(local=build, port=arguments.port, exact=arguments.exact)
        loader = distill.DistillLoader(loader, teachers, send=lambda batch: batch[0])
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            for step in state.steps(loader):
                taken = []
                for images, target, index, *answers in step:
                    answer = answers[0] if answers else torch.zeros(len(images), 10)
                    loss = distill.distillation_loss(
                        model(images), answer, target, temperature=TEMPERATURE,
                        weight=0.0 if arguments.labels_only else WEIGHT,
                    )  # fmt: skip
                    loss.backward()
                    state.loss.update(loss, weight=len(images))
                    taken.append({"indices": index.tolist(), "answer": digest(answer)})
                    time.sleep(arguments.work)
                # Before the step: the last world that took it has made it, one before may not have come so far.
                note(step=state.step, generation=state.generation, size=edl_hvd.size(), rank=edl_hvd.rank(),
                     pid=os.getpid(), taken=taken)  # fmt: skip
                optimizer.step()
                optimizer.zero_grad()
            mean_loss = state.loss.compute()
            if edl_hvd.rank() == 0:
                note(epoch=epoch, loss=mean_loss, accuracy=accuracy(model, test_images, test_targets))

    train(state)
    if edl_hvd.rank() == 0:
        note(weights=digest(torch.cat([parameter.flatten() for parameter in model.parameters()])))


if __name__ == "__main__":
    main()
