"""What metrics cost a commit, and what they cost where they are updated.

    python benchmarks/metrics.py [--ranks 2] [--commits 200]

Each rank is a worker under ``horovodrun`` on this machine, over Gloo. A commit is that between two batches of a small
model: without metrics, with metrics that only an evaluation updates, and with metrics updated in every step. Then the
bytes of their message, and one update with the losses or scores of a batch of 64. Medians; the variants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.metrics import AUC, Accuracy, Max, Mean, Metric

BATCH_SIZE, CLASSES, STEPS = 64, 100, 50
REPOSITORY = Path(__file__).resolve().parent.parent


def variants() -> dict[str, tuple[dict[str, Metric], bool]]:
    """Metrics by name, and whether the training updates them."""
    return {
        "no metrics": ({}, False),
        "accuracy and loss, evaluation only": ({"accuracy": Accuracy(), "loss": Mean()}, False),
        "accuracy": ({"accuracy": Accuracy()}, True),
        "accuracy and loss": ({"accuracy": Accuracy(), "loss": Mean()}, True),
        "two accuracies, three means, a maximum": (
            {**{f"accuracy{i}": Accuracy(i + 1) for i in range(2)}, **{f"mean{i}": Mean() for i in range(3)},
             "largest": Max()}, True,
        ),
    }  # fmt: skip


def update(metric: Metric, scores: torch.Tensor, target: torch.Tensor, losses: torch.Tensor) -> None:
    if isinstance(metric, Accuracy):
        metric.update(scores, target)
    elif isinstance(metric, AUC):
        metric.update(scores[:, 0], target == 0)
    elif isinstance(metric, (Mean, Max)):
        metric.update(losses)


def seconds_of_commits(metrics: dict[str, Metric], trains: bool, commits: int) -> list[float]:
    """The time of each commit between two batches, the first epoch aside."""
    model = torch.nn.Linear(8, CLASSES)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    dataset = TensorDataset(torch.randn(STEPS * BATCH_SIZE, 8), torch.randint(CLASSES, (STEPS * BATCH_SIZE,)))
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=BATCH_SIZE)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, **metrics)
    loader = DataLoader(dataset, batch_sampler=batches)
    found: list[float] = []

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        commit_step = state._runtime.commit_step

        def timed(answer: Any) -> None:
            begun_s = time.perf_counter()
            commit_step(answer)
            if state.epoch > 0:
                found.append(time.perf_counter() - begun_s)

        state.__dict__["commit_step"] = timed
        for _ in state.epochs(1 + -(-commits // STEPS)):
            for features, target in state.batches(loader):
                optimizer.zero_grad()
                scores = model(features)
                losses = torch.nn.functional.cross_entropy(scores, target, reduction="none")
                losses.mean().backward()
                optimizer.step()
                if trains:
                    for metric in metrics.values():
                        update(metric, scores.detach(), target, losses.detach())

    train(state)
    return found


def work(commits: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    edl_hvd.init()
    found: dict[str, list[float]] = {name: [] for name in variants()}
    for _ in range(3):
        for name, (metrics, trains) in variants().items():
            found[name] += seconds_of_commits(metrics, trains, commits // 3)
    if edl_hvd.rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)


def microseconds(function: Callable[[], object], times: int = 300) -> float:
    taken = []
    for _ in range(times):
        begun_s = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--commits", type=int, default=300)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.commits)
        return
    command = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(options.ranks), "-H",
               f"localhost:{options.ranks}", "--network-interfaces", "lo", sys.executable, __file__, "--work",
               "--commits", str(options.commits)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    found = next(json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line)
    print(f"{'metrics in State':44}{'a commit':>12}{'bytes in the message':>24}")
    for name, (metrics, trains) in variants().items():
        words = sum(2 + metric.layout.sums + options.ranks * (metric.layout.largest + 1) for metric in metrics.values())
        size = f"{8 * (1 + words)}" if trains else "-"
        print(f"{name:44}{statistics.median(found[name]) * 1e3:9.2f} ms{size:>24}")
    torch.set_num_threads(1)
    scores, target = torch.randn(BATCH_SIZE, CLASSES), torch.randint(CLASSES, (BATCH_SIZE,))
    losses = torch.rand(BATCH_SIZE)
    print(f"\n{'update with a batch of 64':44}{'seconds':>12}")
    for metric in (Accuracy(), Accuracy(5), Mean(), Max(), AUC()):
        name = f"{type(metric).__name__}({getattr(metric, 'top_k', '')})"
        print(f"{name:44}{microseconds(lambda metric=metric: update(metric, scores, target, losses)):9.0f} us")
    auc = AUC()
    auc.update(torch.randn(100_000), torch.rand(100_000) < 0.3)
    print(f"{'AUC().compute() of 100,000':44}{microseconds(auc.compute, 10) / 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
