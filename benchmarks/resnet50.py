"""Images per second of ResNet-50 on one GPU: plain PyTorch, edl_hvd alone, and under edlrun.

    python benchmarks/resnet50.py [--rounds 3] [--steps 40] [--batch 256] [--micro-batch 128] [--ways plain edlrun]

Random images of 224 × 224 that lie on the GPU, bfloat16 autocast, channels last, SGD with momentum. All ways train the
same: a step is a global batch in micro-batches, whose gradients plain PyTorch adds up. Jobs of all ways take turns. A
number is a job's median over its steps after a warm-up; a row has the median of its jobs, and the ratio to the first.

    plain               plain PyTorch
    python              edl_hvd, started with python
    edlrun-no-commits   under edlrun, without a commit in the time measured
    edlrun              under edlrun, with a commit after every step, as elastic jobs have by default
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WARM_UP_STEPS = 8
# Whether edlrun starts it, and steps between commits; plain PyTorch has none.
WAYS = {"plain": (False, 0), "python": (False, 1), "edlrun-no-commits": (True, 1_000_000), "edlrun": (True, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each way (default 3)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a job that count (default 40)")
    parser.add_argument("--batch", type=int, default=256, help="images of a step (default 256)")
    parser.add_argument("--micro-batch", type=int, default=128, help="images of a forward pass (default 128)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--way", choices=["plain", "edl_hvd"], help=argparse.SUPPRESS)
    parser.add_argument("--commit-every", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        seconds = (plain if options.way == "plain" else elastic)(options)
        options.output.write_text(json.dumps(options.batch / statistics.median(seconds[WARM_UP_STEPS:])))
        return
    found: dict[str, list[float]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            found[way].append(run(way, options))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"ResNet-50 on {name}, torch {torch.__version__}, batch {options.batch} of {options.micro_batch}")
    base = statistics.median(found[options.ways[0]])
    for way, speeds in found.items():
        speed = statistics.median(speeds)
        print(f"{way:<20}{speed:>9.1f} images/s{speed / base:>8.3f}   ({min(speeds):.1f} to {max(speeds):.1f})")


def run(way: str, options: argparse.Namespace) -> float:
    is_launched, commit_every = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "speed.json"
        edlrun = [str(Path(sys.executable).with_name("edlrun")), "-np", "1", "-H", "localhost:1"]
        command = [
            *(edlrun if is_launched else []), sys.executable, __file__, "--output", str(output),
            "--way", "edl_hvd" if commit_every else "plain", "--commit-every", str(commit_every),
            "--device", options.device, "--image-size", str(options.image_size), "--steps", str(options.steps),
            "--batch", str(options.batch), "--micro-batch", str(options.micro_batch),
        ]  # fmt: skip
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the job {way} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        speed: float = json.loads(output.read_text())
        return speed


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    from edl_hvd.compat.torchvision_operators import define_missing_operators

    define_missing_operators()
    import torchvision

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def data(options: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size = options.image_size
    images = torch.randn(options.micro_batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(1000, (options.micro_batch,), device=device)


def timed_steps(options: argparse.Namespace) -> tuple[list[float], Callable[[], None]]:
    """The seconds of each step, and a function that is called behind one."""
    seconds: list[float] = []
    last_s = [0.0]

    def note() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        if last_s[0]:
            seconds.append(now_s - last_s[0])
        last_s[0] = now_s

    return seconds, note


def plain(options: argparse.Namespace) -> list[float]:
    device = torch.device(options.device)
    model, optimizer = build(options, device)
    images, labels = data(options, device)
    rounds = options.batch // options.micro_batch
    seconds, note = timed_steps(options)
    for _ in range(WARM_UP_STEPS + options.steps + 1):
        optimizer.zero_grad()
        for _ in range(rounds):
            with torch.autocast(device.type, torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            (loss / rounds).backward()
        optimizer.step()
        note()
    return seconds


def elastic(options: argparse.Namespace) -> list[float]:
    import edl_hvd

    edl_hvd.init()
    device = torch.device(options.device)
    model, plain_optimizer = build(options, device)
    optimizer = edl_hvd.DistributedOptimizer(plain_optimizer, model.named_parameters())
    images, labels = data(options, device)
    samples = options.batch * (WARM_UP_STEPS + options.steps + 1)
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=options.batch, micro_batch=options.micro_batch)
    loader = torch.utils.data.DataLoader(range(samples), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    seconds, note = timed_steps(options)

    @edl_hvd.elastic(commit_every=options.commit_every)
    def train(state: edl_hvd.State) -> None:
        for _ in state.epochs(1):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for _ in step:
                    with torch.autocast(device.type, torch.bfloat16):
                        loss = torch.nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                optimizer.step()
                note()

    train(state)
    return seconds


if __name__ == "__main__":
    main()
