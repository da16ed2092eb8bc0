"""Goodput of a batch that is chosen while the job runs, beside that of fixed ones: real jobs of two workers on digits.

    python benchmarks/goodput.py [--batches 4 16 64 256] [--runs 1] [--accuracy 0.97] [--most-s 120]
    python benchmarks/goodput.py --cost

Each job trains a small convolutional network on scikit-learn's handwritten digits, with AdaScale over a base batch of
4 samples per worker, until a given share of the held-out images is recognised. Goodput is what AdaScale counts:
scale-invariant steps, times the samples of the base batch, per second of training. The model of throughput is fitted to
what the job with ``WorkerBatch("auto")`` measured, and asked for the throughput of the fixed batches, most of which it
has never seen.

``--cost`` measures what it costs to know the noise: steps of ResNet-18 on 32 images of 64 x 64 per worker, five with
and five without in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = 4  # samples per worker
WORKERS = 2
RATE = 0.02
COST_STEPS = 110


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16, 64, 256], help="fixed, samples per worker")
    parser.add_argument("--runs", type=int, default=1, help="jobs of each kind; medians count (default 1)")
    parser.add_argument("--accuracy", type=float, default=0.97, help="where a job ends (default 0.97)")
    parser.add_argument("--most-s", type=float, default=120, help="most seconds of a training (default 120)")
    parser.add_argument("--cost", action="store_true", help="what measuring the noise costs")
    parser.add_argument("--worker", nargs=2, metavar=("BATCH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker and arguments.worker[0] == "cost":
        cost(Path(arguments.worker[1]))
        return
    if arguments.worker:
        train(arguments.worker[0], Path(arguments.worker[1]), arguments.accuracy, arguments.most_s)
        return
    if arguments.cost:
        found = job("cost", arguments)
        for what, key in (("without", "0"), ("with", "1")):
            print(f"a step {what} the noise: {found[key]:.3f} s, median of {found['steps']}")
        print(f"with / without, median of {found['pairs']} pairs: {found['ratio']:.3f}")
        return
    kinds = ["auto", *map(str, arguments.batches)]
    jobs = {kind: [job(kind, arguments) for _ in range(arguments.runs)] for kind in kinds}
    show(jobs)


def job(batch: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one; what its rank 0 reports, with the events."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", str(WORKERS), "-H", f"localhost:{WORKERS}",
            sys.executable, __file__, "--worker", batch, name,
            "--accuracy", str(arguments.accuracy), "--most-s", str(arguments.most_s),
        ]  # fmt: skip
        environment = {**os.environ, "EDL_HVD_EVENTS": str(folder / "events"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"a job ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
        from edl_hvd.events import read_events

        found: dict[str, Any] = json.loads((folder / "report.json").read_text())
        found["looks"] = [event for event in read_events(folder / "events") if event["event"] == "batch"]
        return found


def train(batch: str, folder: Path, accuracy: float, most_s: float) -> None:
    """One worker."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import edl_hvd
    from edl_hvd.worker.training import tuning

    torch.set_num_threads(1)
    edl_hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held = torch.arange(len(labels)) % 6 == 0
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model.named_parameters())
    most = 256 if batch == "auto" else int(batch)
    policy = edl_hvd.WorkerBatch("auto", learning_rate="adascale", base_size=WORKERS, min=BASE, max=most)
    data = torch.utils.data.TensorDataset(images[~held], labels[~held])
    batches = edl_hvd.ElasticBatchSampler(len(data), policy=policy)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, trained_s=0.0)
    if batch != "auto":  # fixed, with AdaScale over the same base as the others
        state._runtime.store.learning.worker_batch = most
        tuning.EVERY_STEPS = 1 << 60

    @edl_hvd.elastic
    def run(state: edl_hvd.State) -> None:
        for _ in state.epochs(10**6):
            start_s = time.monotonic()
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            state.trained_s += float(edl_hvd.allreduce(torch.tensor(time.monotonic() - start_s), "max"))
            with torch.no_grad():
                right = float((model(images[held]).argmax(1) == labels[held]).float().mean())
            if right >= accuracy or state.trained_s > most_s:
                break
        if edl_hvd.rank() == 0:
            report = {
                "seconds": state.trained_s, "samples": state.samples, "steps": state.step, "accuracy": right,
                "base_samples": state.scale_invariant_steps * policy.base_samples, "noise": state.gradient_noise_scale,
            }  # fmt: skip
            (folder / "report.json").write_text(json.dumps(report))

    run(state)


def cost(folder: Path) -> None:
    """One worker: steps with and without measuring the noise."""
    import torch
    from torch import nn

    import edl_hvd
    from edl_hvd.compat.torchvision_operators import define_missing_operators
    from edl_hvd.worker.training.noise import NoiseMeter

    define_missing_operators()
    import torchvision

    torch.set_num_threads(1)
    edl_hvd.init()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    data = torch.utils.data.TensorDataset(torch.randn(64 * COST_STEPS, 3, 64, 64), torch.arange(64 * COST_STEPS) % 10)
    batches = edl_hvd.ElasticBatchSampler(len(data), global_batch=64)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    meter = NoiseMeter()
    taken: tuple[list[float], list[float]] = ([], [])

    @edl_hvd.elastic
    def run(state: edl_hvd.State) -> None:
        for _ in state.epochs(1):
            since_s = time.monotonic()
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                now_s = time.monotonic()
                taken[state.step // 5 % 2].append(now_s - since_s)
                since_s = now_s
                optimizer.reduction.noise = meter if (state.step + 1) // 5 % 2 else None

    run(state)
    if edl_hvd.rank() == 0:
        without, with_ = (row[5:] for row in taken)  # the first ones warm up
        pairs = [b / a for a, b in zip(without, with_, strict=False)]
        report = {
            "0": statistics.median(without), "1": statistics.median(with_), "steps": len(with_),
            "ratio": statistics.median(pairs), "pairs": len(pairs),
        }  # fmt: skip
        (folder / "report.json").write_text(json.dumps(report))


def show(jobs: dict[str, list[dict[str, Any]]]) -> None:
    """The looks of the jobs with a chosen batch, and a table of all jobs."""
    from edl_hvd.rescale.goodput import batch_plan
    from edl_hvd.rescale.throughput import fit
    from edl_hvd.timings import Timing, with_timing

    known: tuple[Timing, ...] = ()
    errors = []
    print("what the jobs with WorkerBatch('auto') measured, each 50 steps, and what the model had predicted\n")
    print(f"{'step':>6}{'batch':>7}{'samples/s':>11}{'predicted':>11}{'noise scale':>13}{'efficiency':>12}{'next':>7}")
    for look in itertools.chain.from_iterable(job["looks"] for job in jobs["auto"]):
        parts = look["worker_batch"] // look["micro_batch"]
        step_s = look["worker_batch"] * look["size"] / look["samples_per_s"]
        known = with_timing(known, Timing(look["size"], look["micro_batch"], parts, step_s))
        predicted = look["predicted_samples_per_s"]
        if predicted is not None:
            errors.append(abs(predicted / look["samples_per_s"] - 1))
        print(
            f"{look['step']:>6}{look['worker_batch']:>7}{look['samples_per_s']:>11.0f}{predicted or math.nan:>11.0f}"
            f"{look['noise_samples'] or math.inf:>13.0f}{look['efficiency'] or math.nan:>12.2f}"
            f"{look['next_worker_batch']:>7}"
        )
    if errors:
        print(f"\nmedian error of a prediction: {statistics.median(errors):.0%}, largest {max(errors):.0%}\n")
    model = fit(known)
    print(f"{'batch':<8}{'samples/s':>10}{'predicted':>11}{'goodput':>9}{'seconds':>9}{'steps':>7}{'accuracy':>10}")
    for kind, found in jobs.items():
        numbers = [key for key in found[0] if key not in ("looks", "noise")]
        middle = {key: statistics.median(job[key] for job in found) for key in numbers}
        predicted = ""
        if kind != "auto":
            plan = batch_plan(int(kind), WORKERS, None)
            predicted = f"{model.samples_per_s(WORKERS, plan.micro_batch, plan.accumulation_steps):.0f}"
        print(
            f"{kind:<8}{middle['samples'] / middle['seconds']:>10.0f}{predicted:>11}"
            f"{middle['base_samples'] / middle['seconds']:>9.0f}{middle['seconds']:>9.1f}{middle['steps']:>7.0f}"
            f"{middle['accuracy']:>10.3f}"
        )


if __name__ == "__main__":
    main()
