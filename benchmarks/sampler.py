"""What the order of an epoch costs in memory and time, beside torch's samplers; and how much of a shard is read twice.

    python benchmarks/sampler.py

Each row of the first table is a process of its own. "middle" is the time from the call of ``iter`` to the first
micro-batch, for a rank that goes on from the middle of an epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SMALL, LARGE = 10_000_000, 1_300_000_000
RANKS, MICRO_BATCH, GLOBAL_BATCH = 8, 64, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=SMALL, help="samples for the samplers that hold their order")
    parser.add_argument("--large", type=int, default=LARGE, help="samples for those that do not")
    parser.add_argument("--shard-samples", type=int, default=1000, help="samples in each shard")
    parser.add_argument("--row", nargs=2, metavar=("SAMPLER", "SAMPLES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(arguments.row[0], int(arguments.row[1]))))
        return
    print(f"{'':34}{'samples':>15}{'memory MB':>12}{'middle ms':>12}{'micro-batch µs':>16}")
    for name, samples in [*((name, arguments.small) for name in SAMPLERS), ("elastic", arguments.large)]:
        command = [sys.executable, __file__, "--row", name, str(samples)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{TITLES[name]:34}{samples:15,}{row['memory_mb']:12.1f}{row['middle_ms']:12.2f}{row['batch_us']:16.1f}")
    print(f"\nsamples read per sample dealt, {SHARDS} shards of {arguments.shard_samples}; "
          f"{PARTS} micro-batches of {MICRO_BATCH} a step")  # fmt: skip
    for title, numbers in amplification(arguments.shard_samples):
        print(f"{title:66}{numbers:8.3f}")


# -- the order --


def elastic(samples: int) -> Iterator[list[int]]:
    import edl_hvd

    sampler = edl_hvd.ElasticBatchSampler(samples, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
    middle = samples // 2 // GLOBAL_BATCH * GLOBAL_BATCH
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 1, "offset": middle})
    sampler.set_world(3, RANKS)
    return iter(sampler)


def distributed(samples: int) -> Iterator[list[int]]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(samples), num_replicas=RANKS, rank=3)  # type: ignore[arg-type]
    sampler.set_epoch(1)
    return _batches_from(iter(sampler), samples // 2 // RANKS)


def random_order(samples: int) -> Iterator[list[int]]:
    from torch.utils.data import RandomSampler

    return _batches_from(iter(RandomSampler(range(samples))), samples // 2)


def _batches_from(indices: Iterator[int], middle: int) -> Iterator[list[int]]:
    rest = itertools.islice(indices, middle, None)
    while batch := list(itertools.islice(rest, MICRO_BATCH)):
        yield batch


SAMPLERS: dict[str, Callable[[int], Iterator[list[int]]]] = {
    "random": random_order,
    "distributed": distributed,
    "elastic": elastic,
}
TITLES = {
    "random": "torch RandomSampler",
    "distributed": "torch DistributedSampler, 8 ranks",
    "elastic": "ElasticBatchSampler, 8 ranks",
}


def measure(name: str, samples: int) -> dict[str, float]:
    for _ in zip(range(3), SAMPLERS[name](10_000), strict=False):  # imports, and what is made only once
        pass
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.perf_counter()
    batches = SAMPLERS[name](samples)
    next(batches)
    middle_s = time.perf_counter() - started_s
    times_s = []
    for _ in range(2000):
        started_s = time.perf_counter()
        if next(batches, None) is None:
            break
        times_s.append(time.perf_counter() - started_s)
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    return {"memory_mb": memory_kb / 1024, "middle_ms": middle_s * 1e3, "batch_us": statistics.median(times_s) * 1e6}


# -- shards --

SHARDS, PARTS = 512, 16


def amplification(shard_samples: int) -> Iterator[tuple[str, float]]:
    """Reads of streams that cannot skip; with files that can, as plain tar files, the rest is headers."""
    for workers, processes, interleave in ((4, 8, 8), (4, 4, 8), (4, 8, 1), (3, 8, 8), (1, 8, 8)):
        title = f"{workers} workers x {processes} loader processes, interleave={interleave}"
        yield title, _read(shard_samples, [(workers, None)], processes, interleave)
    yield "4 x 8, a worker lost in the middle of the epoch", _read(shard_samples, [(4, 250), (3, None)], 8, 8)
    yield (
        "4 x 8, ten changes of the world in one epoch",
        _read(shard_samples, [(4 - turn % 2, 45) for turn in range(10)] + [(4, None)], 8, 8),
    )


def _read(shard_samples: int, worlds: list[tuple[int, int | None]], processes: int, interleave: int) -> float:
    """Samples read over samples in the epoch; each world makes the given number of steps."""
    import edl_hvd

    passed = itertools.count()

    def read(shard: int) -> Iterator[int]:
        for sample in range(shard_samples):
            next(passed)
            yield sample

    state: dict[str, Any] | None = None
    for workers, steps in worlds:
        for rank in range(workers):
            loaders = [edl_hvd.ElasticShards(range(SHARDS), [shard_samples] * SHARDS, read=read)
                       for _ in range(processes)]  # fmt: skip
            batches = loaders[0].sampler(
                global_batch=PARTS * MICRO_BATCH, micro_batch=MICRO_BATCH, interleave=interleave
            )
            batches.load_state_dict(state or batches.state_dict())
            batches.set_world(rank, workers)
            mine = list(itertools.islice(batches.steps(), steps))
            items = sum(len(step.share) for step in mine)
            for number, indices in enumerate(itertools.islice(batches, items)):
                for index in indices:
                    loaders[number % processes][index]
            for step in mine:
                batches.advance(step)
        state = batches.state_dict()
    return next(passed) / (SHARDS * shard_samples)


if __name__ == "__main__":
    main()
