"""The same training as ``digits.py``, in plain PyTorch: one process, which holds the teacher as well.

python examples/distill/plain.py
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
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
arguments = parser.parse_args()
torch.set_num_threads(1)
dataset, test_images, test_targets = digits()
teacher = train_teacher().eval()
model = make_student()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH)
for epoch in range(arguments.epochs):
    total = 0.0
    for all_images, all_targets in loader:
        for images, target in zip(all_images.split(MICRO_BATCH), all_targets.split(MICRO_BATCH), strict=True):
            with torch.no_grad():
                answer = teacher(images)
            logits = model(images)
            own, wanted = log_softmax(logits / TEMPERATURE, dim=-1), log_softmax(answer / TEMPERATURE, dim=-1)
            distilled = TEMPERATURE**2 * kl_div(own, wanted, reduction="batchmean", log_target=True)
            labels = (cross_entropy(logits, target.clamp(min=0), reduction="none") * (target >= 0)).mean()
            loss = WEIGHT * distilled + (1 - WEIGHT) * labels
            (loss * len(images) / len(all_images)).backward()
            total += loss.item() * len(images)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {total / len(dataset):.6f}", flush=True)
print(f"accuracy {accuracy(model, test_images, test_targets):.4f}", flush=True)
