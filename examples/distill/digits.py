"""A small network learns digits from 200 labels, and from what a larger one says of 1,057 images without.

python examples/distill/digits.py                                    # the teacher computes in this process
edl-hvd teach examples/distill/digits.py:build --devices cpu,cpu     # two teachers, on ports 7010 and 7011
edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/digits.py
"""

from __future__ import annotations

import argparse

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
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd import distill


def build() -> torch.nn.Module:
    """The teacher, for ``edl-hvd teach``."""
    return train_teacher()


def main() -> None:
    """Train the student and print the loss of each epoch, and the accuracy at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--labels-only", action="store_true", help="learn from the 200 labels alone, for comparison")
    parser.add_argument("--port", type=int, default=7010, help="of the first teacher of each host")
    arguments = parser.parse_args()
    edl_hvd.init()
    torch.set_num_threads(1)  # several workers share this machine
    dataset, test_images, test_targets = digits()
    model = make_student()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), model.named_parameters()
    )
    batches = edl_hvd.ElasticBatchSampler(
        len(dataset), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, shuffle=False
    )
    teachers = distill.Teachers(local=build, port=arguments.port)
    loader = distill.DistillLoader(DataLoader(dataset, batch_sampler=batches), teachers, send=lambda batch: batch[0])
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())
    weight = 0.0 if arguments.labels_only else WEIGHT

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            for step in state.steps(loader):
                for images, target, answer in step:
                    loss = distill.distillation_loss(
                        model(images), answer, target, temperature=TEMPERATURE, weight=weight
                    )
                    loss.backward()
                    state.loss.update(loss, weight=len(images))
                optimizer.step()
                optimizer.zero_grad()
            if edl_hvd.rank() == 0:
                print(f"epoch {epoch + 1}: loss {state.loss.compute():.6f}, workers {edl_hvd.size()}", flush=True)
        if edl_hvd.rank() == 0:
            print(f"accuracy {accuracy(model, test_images, test_targets):.4f}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
