"""What ``exact=True`` costs a step of ResNet-18 at 64 × 64 with two workers, beside the ordinary sum.

    python benchmarks/exact.py [--rounds 3] [--steps 12] [--workers 2]

Jobs of both kinds take turns, under ``edlrun``; a step is a global batch of 32 in micro-batches of 8. Time from one
step to the next, medians over the steps of a job and over the jobs of a kind; computing time of a rank per step, which
others on the machine disturb less; bytes that a rank sends per step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

GLOBAL_BATCH, MICRO_BATCH, CLASSES = 32, 8, 10
KINDS = ("ordinary", "exact")
WARM_UP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=12, help="steps of a job that count")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="samples per forward pass")
    parser.add_argument("--job", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work(options)
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind in KINDS:
            found[kind].append(run(kind, options))
    medians = {
        kind: {what: statistics.median(result[what] for result in results) for what in results[0]}
        for kind, results in found.items()
    }
    print(f"\n{'':10} {'step, s':>9} {'ratio':>6} {'computing, s':>13} {'ratio':>6} {'commit, s':>10} {'MB sent':>9}")
    for kind, row in medians.items():
        step, cpu = (row[what] / medians["ordinary"][what] for what in ("step_s", "cpu_s"))
        print(
            f"{kind:10} {row['step_s']:9.3f} {step:6.2f} {row['cpu_s']:13.3f} {cpu:6.2f} {row['commit_s']:10.4f} "
            f"{row['bytes'] / 1e6:9.1f}"
        )


def run(kind: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"
        hosts.write_text(f"localhost:{options.workers}\n")
        output = Path(folder) / "result.json"
        command = [Path(sys.executable).with_name("edlrun"), "-np", str(options.workers), "--discover", f"file:{hosts}",
                   sys.executable, __file__, "--job", kind, "--steps", str(options.steps), "--output", output,
                   "--micro-batch", str(options.micro_batch)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the {kind} job failed:\n{done.stdout}{done.stderr}")
        result: dict[str, float] = json.loads(output.read_text())
        return result


def work(options: argparse.Namespace) -> None:
    import edl_hvd
    from edl_hvd.compat.torchvision_operators import define_missing_operators

    define_missing_operators()
    import torchvision

    torch.set_num_threads(1)
    edl_hvd.init()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=CLASSES).to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(sgd, model.named_parameters(), exact=options.job == "exact")
    samples = GLOBAL_BATCH * (WARM_UP_STEPS + options.steps + 1)
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=GLOBAL_BATCH, micro_batch=options.micro_batch)
    images = torch.randn(64, 3, 64, 64)
    numbers = range(samples)
    dataset = torch.utils.data.StackDataset([images[i % 64] for i in numbers], [i % CLASSES for i in numbers])
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    commits = _timed(state, "commit_step")
    handed = _counted_bytes()
    moments: list[tuple[float, float, int]] = []

    @edl_hvd.elastic
    def train(state: Any) -> None:
        for _ in state.epochs(1):
            for pixels, label in state.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(pixels), label).backward()
                optimizer.step()
                if optimizer.at_boundary:
                    moments.append((time.perf_counter(), time.process_time(), handed[0]))

    train(state)
    if edl_hvd.rank() == 0:
        kept = moments[WARM_UP_STEPS:]
        steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(kept)]
        result = {
            "step_s": statistics.median(steps),
            "commit_s": statistics.median(commits[WARM_UP_STEPS:]),
            "cpu_s": (kept[-1][1] - kept[0][1]) / len(steps),
            "bytes": (kept[-1][2] - kept[0][2]) / len(steps),
        }
        options.output.write_text(json.dumps(result))


def _timed(holder: Any, name: str) -> list[float]:
    original, found = getattr(holder, name), []

    def timed(*arguments: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            found.append(time.perf_counter() - start_s)

    setattr(holder, name, timed)
    return found


def _counted_bytes() -> list[int]:
    """What a rank sends of its gradients: in a ring twice (W - 1) / W of them."""
    import edl_hvd
    from edl_hvd.worker.engine.horovod_collectives import HorovodCollectives as Collectives

    sent = [0]

    def counting(name: str, share: Any) -> None:
        original = getattr(Collectives, name)

        def counted(self: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
            sent[0] += int(tensor.nbytes * share(edl_hvd.size()))
            return original(self, tensor, *arguments)

        setattr(Collectives, name, counted)

    counting("start_sum", lambda size: 2 * (size - 1) / size)
    counting("start_exchange", lambda size: (size - 1) / size)  # it keeps its own part
    counting("start_gather", lambda size: size - 1)  # its part of the sum goes to everybody
    return sent


if __name__ == "__main__":
    main()
