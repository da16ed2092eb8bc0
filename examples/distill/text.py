"""A bag of words learns which package a docstring is of, from 800 labels and what a teacher says of all texts.

python examples/distill/text.py                                      # the teacher computes in this process
edl-hvd teach examples/distill/text.py:build --devices cpu,cpu       # two teachers, on ports 7010 and 7011
edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/text.py

``text_plain.py`` is the same training in plain PyTorch.
"""

from __future__ import annotations

import argparse

import torch
from texts import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    MICRO_BATCH,
    TEMPERATURE,
    WEIGHT,
    TextTeacher,
    known,
    make_text_student,
    text_accuracy,
    texts,
    train_text_teacher,
)
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd import distill


def build() -> TextTeacher:
    """The teacher, for ``edl-hvd teach``: a callable, no torch module."""
    return train_text_teacher()


def main() -> None:
    """Train the student and print the loss of each epoch, and the accuracy at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--port", type=int, default=7010, help="of the first teacher of each host")
    arguments = parser.parse_args()
    edl_hvd.init()
    torch.set_num_threads(1)  # several workers share this machine
    training, test = texts()
    dataset = TensorDataset(training.letters, training.words, known(training.targets))
    model = make_text_student()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), model.named_parameters()
    )
    batches = edl_hvd.ElasticBatchSampler(
        len(dataset), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, shuffle=False
    )
    teachers = distill.Teachers(local=build, port=arguments.port)
    # The teacher reads letters, and the student numbers of words: only the former travel.
    loader = distill.DistillLoader(DataLoader(dataset, batch_sampler=batches), teachers, send=lambda batch: batch[0])
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            for step in state.steps(loader):
                for _, words, target, answer in step:
                    loss = distill.distillation_loss(
                        model(words), answer, target, temperature=TEMPERATURE, weight=WEIGHT
                    )
                    loss.backward()
                    state.loss.update(loss, weight=len(words))
                optimizer.step()
                optimizer.zero_grad()
            mean_loss = state.loss.compute()
            if edl_hvd.rank() == 0:
                print(f"epoch {epoch + 1}: loss {mean_loss:.6f}, workers {edl_hvd.size()}", flush=True)
        if edl_hvd.rank() == 0:
            print(f"accuracy {text_accuracy(model, test):.4f}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
