"""A student that checks every answer, and tells at the end what it has learned; ``test_distill.py`` runs it.

distill_script.py FOLDER PORT EPOCHS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd import distill

sys.path.append(str(Path(__file__).parents[1] / "support"))
from fleet import CLASSES, Images, Sums, sums


def note(folder: Path, **fields: Any) -> None:
    with open(folder / f"trace-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def main() -> None:
    folder, port, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    edl_hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner, model.named_parameters(), exact=True)
    dataset = Images(240)
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=16, micro_batch=4, seed=7)
    teachers = distill.Teachers(port=port, local=Sums, exact=True, patience="100s")
    loader = distill.DistillLoader(
        DataLoader(dataset, batch_sampler=batches, num_workers=1), teachers, send=lambda batch: batch[0]
    )
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for _ in state.epochs(epochs):
            for step in state.steps(loader):
                indices: list[int] = []
                for images, index, answer in step:
                    assert torch.equal(answer, sums(images))
                    loss = torch.nn.functional.mse_loss(model(images), answer / 10)
                    loss.backward()
                    indices += index.tolist()
                # A step counts only if all workers have come so far; one that is rolled back is noted once more.
                note(folder, takes=state.step, generation=state.generation, indices=indices)
                optimizer.step()
                optimizer.zero_grad()
                note(folder, step=state.step, size=edl_hvd.size(), rank=edl_hvd.rank(), pid=os.getpid())
                # There is time for what is to happen, and none is lost afterwards.
                time.sleep(0.0 if (folder / "fast").exists() else 0.4)
        if edl_hvd.rank() == 0:
            digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
            (folder / "digest").write_text(digest.hexdigest())

    train(state)


if __name__ == "__main__":
    main()
