"""What a step of the loop costs beside a bare PyTorch loop, plain Horovod, and an earlier version of this package.

    python benchmarks/loop_overhead.py                     # a world of one, a tiny model: microseconds per step
    python benchmarks/loop_overhead.py --workers 2         # beside hvd.DistributedOptimizer, one micro-batch per worker
    python benchmarks/loop_overhead.py --before PATH       # beside the checkout of an earlier version

Variants take turns in one run, so that what else the machine does hits all of them alike; printed are medians over the
turns, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def worker(variant: str, steps: int, width: int, micro: int) -> None:
    """Time the steps of one variant; rank 0 prints seconds per step."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = int(os.environ.get("BENCH_WORKERS", "1"))
    global_batch = 8 * size * micro
    inputs, target = torch.randn(global_batch, width), torch.randint(0, 10, (global_batch,))
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    part = [(inputs[:8], target[:8])] * micro
    times = []

    def mark() -> None:
        times.append(time.perf_counter())

    if variant == "bare":
        for _ in range(steps):
            for x, y in part:
                (F.cross_entropy(model(x), y) / micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            mark()
    elif variant == "horovod":
        import horovod.torch as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for _ in range(steps):
            for x, y in part:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            mark()
        if hvd.rank() != 0:
            return
    else:
        import edl_hvd

        class Repeated(list):
            """Batches without a loader's cost: what is measured is the loop."""

        edl_hvd.init()
        optimizer = edl_hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        batches = edl_hvd.ElasticBatchSampler(
            global_batch * steps, global_batch=global_batch, micro_batch=8 if micro > 1 else None, shuffle=False
        )
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
        del DataLoader, TensorDataset

        class Loader:
            batch_sampler = batches

            def __iter__(self):
                while True:
                    yield from part

        loader = Loader()

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                if variant == "steps":
                    for step in state.steps(loader):
                        for x, y in step:
                            F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        mark()
                else:
                    for x, y in state.batches(loader):
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if optimizer.at_boundary:
                            mark()

        train(state)
        if edl_hvd.rank() != 0:
            return
    gaps = [b - a for a, b in zip(times[len(times) // 5 :], times[len(times) // 5 + 1 :], strict=False)]
    print("RESULT " + json.dumps(statistics.median(gaps)), flush=True)


def run(variant: str, arguments: argparse.Namespace, path: Path | None) -> float:
    environment = {**os.environ, "BENCH_WORKERS": str(arguments.workers), "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    script = [sys.executable, str(HERE), "--worker", variant, "--steps", str(arguments.steps)]
    script += ["--width", str(arguments.width), "--micro", str(arguments.micro)]
    if arguments.workers > 1:
        launch = "horovodrun" if variant == "horovod" else "edlrun"
        hosts = [] if launch == "edlrun" else ["--network-interfaces", "lo"]
        flags = ["-np", str(arguments.workers), "-H", f"localhost:{arguments.workers}", *hosts]
        if launch == "edlrun":
            module = "import sys; from edl_hvd.cli.edlrun import main; sys.argv[0] = 'edlrun'; main()"
            # -P: else a checkout that this is run in comes before that of --before.
            script = [sys.executable, "-P", "-c", module, *flags, *script]
        else:
            script = [launch, *flags, *script]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    found = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if not found:
        raise SystemExit(f"{variant} printed no result:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help="of the world (default 1)")
    parser.add_argument("--steps", type=int, default=600, help="per turn (default 600)")
    parser.add_argument("--turns", type=int, default=5, help="of each variant (default 5)")
    parser.add_argument("--width", type=int, default=32, help="of the model's layers (default 32: tiny)")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per worker and step (default 1)")
    parser.add_argument("--before", type=Path, help="checkout of an earlier version to compare with")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.steps, arguments.width, arguments.micro)
        return
    variants: list[tuple[str, str, Path | None]] = [("batches", "flat", None), ("steps", "steps", None)]
    variants += [("horovod", "horovod", None)] if arguments.workers > 1 else [("bare loop", "bare", None)]
    if arguments.before:
        variants.append(("batches before", "flat", arguments.before))
    found: dict[str, list[float]] = {name: [] for name, _, _ in variants}
    for turn in range(arguments.turns):
        for name, variant, path in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
            found[name].append(run(variant, arguments, path))
    medians = {name: statistics.median(values) for name, values in found.items()}
    base = medians.get("bare loop", medians.get("horovod", 0.0))
    for name, value in medians.items():
        rest = f"{value / base:6.2f} x, {1e6 * (value - base):8.1f} us more" if value != base else ""
        spread = ", ".join(f"{1e6 * one:.0f}" for one in sorted(found[name]))
        print(f"{name:16} {1e6 * value:9.1f} us per step  {rest:32} ({spread})")
    if arguments.before:
        print(f"batches now / before: {medians['batches'] / medians['batches before']:.3f}")


if __name__ == "__main__":
    main()
