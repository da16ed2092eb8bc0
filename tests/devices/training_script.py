"""Trains a small model alone, on the CPU, on the far device or on both, and prints what came of it as JSON.

    python training_script.py LIBRARY DEVICE EPOCHS

Checkpoints go where the environment says. ``digest`` is of the bits of the whole state: the far device computes as the
CPU does, so it is the same wherever the model was.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import far_device
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd

PLACES = {"cpu": ("cpu", "cpu"), "far": ("far", "far"), "both": ("cpu", "far")}


class Network(nn.Module):
    """Its halves may be on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8).to(first)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(second)
        self.register_buffer("mean", torch.zeros(8, device=second))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first, second = self.embedding.weight.device, self.body[0].weight.device
        inputs = self.embedding(words.to(first)).mean(1).to(second)
        if self.training:
            self.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return self.body(inputs - self.mean).cpu()


def main(device: str, epochs: int) -> None:
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randint(50, (64, 4)), torch.randint(3, (64,)))
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=16, micro_batch=16, seed=0)
    loader = DataLoader(dataset, batch_sampler=batches)
    model = Network(*PLACES[device])
    # Each operation by itself, in the same order on every device.
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    optimizer = edl_hvd.DistributedOptimizer(plain, model.named_parameters())
    # Tensors of the script's own.
    average = model.body[0].weight.detach().clone()
    recent = [average.clone()]
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, average=average, recent=recent)
    began: list[int] = []

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        began.append(state.step)
        for _ in state.epochs(epochs):
            for words, labels in state.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(words), labels).backward()
                optimizer.step()
                state.average.mul_(0.9).add_(model.body[0].weight.detach(), alpha=0.1)
                state.recent = [*state.recent[-2:], state.average.clone()]

    train(state)
    _, tensors = state._runtime.store.live(0)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].cpu().contiguous().numpy().tobytes())
    devices = sorted({tensor.device.type for tensor in tensors.values()})
    print(json.dumps({"began": began, "step": state.step, "devices": devices, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    far_device.use(Path(sys.argv[1]))
    edl_hvd.init()
    main(sys.argv[2], int(sys.argv[3]))
