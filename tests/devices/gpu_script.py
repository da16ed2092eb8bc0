"""Trains a small network on a GPU as a tutorial does, in plain PyTorch or with edl_hvd, and saves what it has learned.

    python gpu_script.py FOLDER [--plain] [--precision float32|bfloat16|float16] [--exact] [--deaths N]

Each step takes the whole data set, so that the order of samples plays no part. With ``--exact`` the network has
BatchNorm and dropout, too. With ``--deaths`` the last worker of a world kills itself within its first steps, that many
times in all: mostly while the communicator of NCCL forms, which takes about as long. Then the training goes on until
all have died, and for as many steps as are asked for at least.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, CLASSES = 64, 5
OVERFLOWS_AT = 7  # the step whose images are too large for float16
LONGEST_LIFE_S = 0.8


def data_set() -> TensorDataset:
    chance = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 3, 16, 16, generator=chance)
    return TensorDataset(images, torch.randint(CLASSES, (SAMPLES,), generator=chance))


def network(exact: bool) -> nn.Module:
    torch.manual_seed(5)
    normalise = nn.BatchNorm2d(16) if exact else nn.GroupNorm(4, 16)
    drop = [nn.Dropout(0.3)] if exact else []
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), normalise, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(16, CLASSES)
    )


def precision_of(arguments: argparse.Namespace, device: torch.device) -> tuple[torch.autocast, torch.amp.GradScaler]:
    kind = getattr(torch, arguments.precision)
    autocast = torch.autocast(device.type, kind, enabled=kind != torch.float32)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4, enabled=kind == torch.float16)
    return autocast, scaler


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    model = network(arguments.exact).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    autocast, scaler = precision_of(arguments, device)
    losses, scales = [], []
    for _ in range(arguments.steps):
        for images, labels in DataLoader(data_set(), batch_size=SAMPLES):
            optimizer.zero_grad()
            images = images.to(device) * (1e7 if len(scales) == OVERFLOWS_AT else 1)
            with autocast:
                loss = cross_entropy(model(images), labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, "weights": weights_of(model)}


def elastic(arguments: argparse.Namespace) -> dict[str, Any]:
    import edl_hvd

    edl_hvd.init()
    device = torch.device(arguments.device) if arguments.device == "cpu" else edl_hvd.device()
    model = network(arguments.exact).to(device)
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), exact=arguments.exact
    )
    autocast, scaler = precision_of(arguments, device)
    batches = edl_hvd.ElasticBatchSampler(SAMPLES, global_batch=SAMPLES, micro_batch=8, seed=0)
    loader = DataLoader(data_set(), batch_sampler=batches, pin_memory=device.type == "cuda")
    state = edl_hvd.State(
        model=model, optimizer=optimizer, batches=batches, scaler=scaler, losses=[], scales=[], sizes=[]
    )

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        if arguments.deaths and edl_hvd.size() > 1 and edl_hvd.rank() == edl_hvd.size() - 1:
            die_soon(arguments.folder, arguments.deaths)
        for epoch in state.epochs(10**6 if arguments.deaths else arguments.steps):
            if arguments.deaths and epoch >= arguments.steps:
                have_died = torch.tensor(int(deaths_so_far(arguments.folder) == arguments.deaths))
                if edl_hvd.allreduce(have_died, op="min").item():
                    return
            for step in state.steps(loader):
                optimizer.zero_grad()
                for images, labels in step:
                    images = images.to(device, non_blocking=True)
                    images = images * (1e7 if len(state.scales) == OVERFLOWS_AT else 1)
                    with autocast:
                        loss = cross_entropy(model(images), labels.to(device, non_blocking=True))
                    scaler.scale(loss).backward()
                    step.record(loss=loss)
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                state.losses.append(step.mean("loss"))
                state.scales.append(scaler.get_scale())
                state.sizes.append(edl_hvd.size())
                if deaths_so_far(arguments.folder) < arguments.deaths:
                    time.sleep(0.2)  # less to compute until newcomers have started, which takes some seconds

    train(state)
    found = {"losses": state.losses, "scales": state.scales, "sizes": state.sizes, "weights": weights_of(model)}
    found["momentum"] = [optimizer.state[one]["momentum_buffer"].cpu() for one in model.parameters()]
    return {**found, "rank": edl_hvd.rank(), "size": edl_hvd.size()}


def die_soon(folder: Path, deaths: int) -> None:
    """Within the next moments, unless as many workers have as are to."""
    marks = len(list(folder.glob("death.*")))
    if marks < deaths:
        (folder / f"death.{marks}").write_text(str(os.getpid()))
        chance = random.SystemRandom().uniform(0, LONGEST_LIFE_S)
        threading.Timer(chance, os.kill, (os.getpid(), signal.SIGKILL)).start()


def deaths_so_far(folder: Path) -> int:
    """Of the workers that were to die, those that are gone."""
    doomed = [mark.read_text() for mark in folder.glob("death.*")]
    return sum(bool(pid) and not Path(f"/proc/{pid}").exists() for pid in doomed)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def digest_of(found: dict[str, Any]) -> str:
    """Of the bits of all weights, buffers and momenta."""
    digest = hashlib.sha256()
    for value in [*found["weights"].values(), *found.get("momentum", [])]:
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deaths", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # TF32 rounds the products of micro-batches and of the whole batch to different ones.
    torch.backends.cudnn.allow_tf32 = False
    found = plain(arguments) if arguments.plain else elastic(arguments)
    name = "plain" if arguments.plain else f"rank{found['rank']}"
    torch.save({**found, "digest": digest_of(found)}, arguments.folder / f"{name}.pt")


if __name__ == "__main__":
    # Hosts of a test are one machine, on which NCCL refuses several members on one GPU.
    os.environ["NCCL_HOSTID"] = os.environ.get("EDL_HVD_DRIVER_WORKER", "alone")
    main()
