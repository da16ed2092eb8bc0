"""The same training as ``text.py``, in plain PyTorch: one process, which holds the teacher as well.

python examples/distill/text_plain.py
python examples/distill/text_plain.py --labels-only
"""

from __future__ import annotations

import argparse

import torch
from texts import (
    GLOBAL_BATCH,
    LABELLED,
    LEARNING_RATE,
    MICRO_BATCH,
    TEMPERATURE,
    WEIGHT,
    known,
    make_text_student,
    text_accuracy,
    texts,
    train_text_teacher,
)
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--labels-only", action="store_true", help="learn from the 800 labels alone, for comparison")
arguments = parser.parse_args()
torch.set_num_threads(1)
training, test = texts()
model = make_text_student()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
dataset = TensorDataset(training.letters, training.words, known(training.targets))
epochs = arguments.epochs
if arguments.labels_only:
    teacher, weight = None, 0.0
    dataset = TensorDataset(*(one[:LABELLED] for one in dataset.tensors))
    epochs = epochs * len(training.targets) // LABELLED  # as many steps
else:
    teacher, weight = train_text_teacher(), WEIGHT
for epoch in range(epochs):
    total = 0.0
    for batch in DataLoader(dataset, batch_size=GLOBAL_BATCH):
        parts = zip(*(one.split(MICRO_BATCH) for one in batch), strict=True)
        for letters, words, target in parts:
            logits = model(words)
            loss = (1 - weight) * (cross_entropy(logits, target.clamp(min=0), reduction="none") * (target >= 0)).mean()
            if teacher is not None:
                own, wanted = (log_softmax(one / TEMPERATURE, dim=-1) for one in (logits, teacher(letters)))
                loss = loss + weight * TEMPERATURE**2 * kl_div(own, wanted, reduction="batchmean", log_target=True)
            (loss * len(words) / len(batch[0])).backward()
            total += loss.item() * len(words)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {total / len(dataset):.6f}", flush=True)
print(f"accuracy {text_accuracy(model, test):.4f}", flush=True)
