"""Train a small network on handwritten digits, on whatever workers there are.

    python train.py --epochs 4
    edlrun -np 2 --min-np 1 --discover file:hosts.txt python train.py --epochs 4

The weights are the same bit for bit, whatever happens to the workers (``exact=True``). Each worker writes which samples
it has trained into a file of --index-log, for the demo to count them.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import edl_hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--index-log", type=Path, help="folder")
parser.add_argument("--work", type=float, default=0.05, help="seconds of waiting per micro-batch")
flags = parser.parse_args()

edl_hvd.init()
torch.set_num_threads(1)  # several workers share this machine
torch.manual_seed(flags.seed)


class Digits(Dataset):
    """1,797 images of 8 x 8 pixels; an item is its number, its image and its label."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return index, self.images[index], self.labels[index]


dataset = Digits()
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 10)
)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = edl_hvd.DistributedOptimizer(sgd, model.named_parameters(), exact=True)
batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=128, micro_batch=16, seed=flags.seed)
loader = DataLoader(dataset, batch_sampler=batches)
state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())


def note(step, indices):
    """Append what this worker has trained in a step that every worker has made."""
    if flags.index_log is not None:
        flags.index_log.mkdir(parents=True, exist_ok=True)
        with open(flags.index_log / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "at_s": time.time(), "indices": indices}) + "\n")


@edl_hvd.elastic(checkpoint_every="30s")
def train(state):
    for epoch in state.epochs(flags.epochs):
        for step in state.steps(loader):
            trained = []
            for index, images, labels in step:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                state.loss.update(loss, weight=len(labels))
                trained += index.tolist()
                time.sleep(flags.work)  # stands for the work of an accelerator: two workers take half the time of one
            optimizer.step()
            optimizer.zero_grad()
            note(state.step, trained)
        if edl_hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {state.loss.compute():.6f}, workers {edl_hvd.size()}", flush=True)


train(state)
if edl_hvd.rank() == 0:
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    print(f"weights sha256 {digest.hexdigest()}", flush=True)
