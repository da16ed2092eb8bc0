"""A student that keeps its teachers' answers, and tells at the end what it has learned; ``test_distill.py`` runs it.

kept_script.py FOLDER PORT EPOCHS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd import distill

sys.path.append(str(Path(__file__).parents[1] / "support"))
from fleet import CLASSES, Images, sums


def main() -> None:
    folder, port, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    edl_hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, CLASSES))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner, model.named_parameters(), exact=True)
    dataset = Images(120)
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=8, micro_batch=4, seed=7)
    teachers = distill.Teachers(port=port, exact=True, patience="100s")
    loader = distill.DistillLoader(
        DataLoader(dataset, batch_sampler=batches), teachers, send=lambda batch: batch[0], keep=folder / "kept"
    )
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, teachers=teachers)

    @edl_hvd.elastic(checkpoint=str(folder / "checkpoints"), checkpoint_every="1 epoch")
    def train(state: edl_hvd.State) -> None:
        for _ in state.epochs(epochs):
            for step in state.steps(loader):
                for images, _, answer in step:
                    assert torch.equal(answer, sums(images))
                    torch.nn.functional.mse_loss(model(images), answer / 10).backward()
                optimizer.step()
                optimizer.zero_grad()
                with open(folder / f"trace-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                    line = {"step": state.step, "size": edl_hvd.size(), "rank": edl_hvd.rank(), "pid": os.getpid()}
                    file.write(json.dumps(line) + "\n")
                time.sleep(0.0 if (folder / "fast").exists() else 0.2)
        if edl_hvd.rank() == 0:
            digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
            (folder / "digest").write_text(digest.hexdigest())

    train(state)


if __name__ == "__main__":
    main()
