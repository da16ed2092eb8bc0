"""A student that tells whose answers it learns from; ``test_distill_models.py`` runs it.

distill_models_script.py FOLDER PORT EPOCHS. Each worker has a list of teachers of its own, in FOLDER/HOST. Worker
"localhost" has the two from PORT on, all others the next two. With 0 epochs, the job goes on until the file
FOLDER/enough is there. Without a launcher, PORT is the factor of the teacher's model, which is computed here.
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
from fleet import CLASSES, Images, Scaled, sums


def main() -> None:
    folder, port, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    edl_hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
    os.chdir(folder / host)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner, model.named_parameters(), exact=True)
    dataset = Images(64)
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=16, micro_batch=4, seed=7)
    teachers = distill.Teachers(port=port + 2 * (host != "localhost"), local=lambda: Scaled(port), exact=True)
    loader = distill.DistillLoader(DataLoader(dataset, batch_sampler=batches), teachers, send=lambda batch: batch[0])
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for _ in state.epochs(epochs or 10**6):
            for step in state.steps(loader):
                scales = set()
                for images, _, answer in step:
                    scales.add(round(float((answer / sums(images)).median())))
                    torch.nn.functional.mse_loss(model(images), answer / 10).backward()
                optimizer.step()
                optimizer.zero_grad()
                line = {"step": state.step, "generation": state.generation, "size": edl_hvd.size()}
                with open(folder / f"trace-{os.getpid()}.jsonl", "a", encoding="utf-8") as trace:
                    trace.write(json.dumps({**line, "scales": sorted(scales)}) + "\n")
                time.sleep(0.0 if epochs else 0.05)
            enough = edl_hvd.allreduce(torch.tensor(int((folder / "enough").exists())), op="min")
            if not epochs and enough.item():
                return

    train(state)
    if edl_hvd.rank() == 0:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
        (folder / "digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
