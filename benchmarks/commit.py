"""Cost of a commit: Horovod's ``TorchState`` and ``edl_hvd.State`` side by side, on the same state, in one run.

    python benchmarks/commit.py [--size-mb 100] [--rounds 30]

For one and two workers on this machine it prints the median and the slowest of each, in milliseconds on rank 0. The
state is that of SGD with momentum: half of it parameters, half of it momentum. The two take turns, so that whatever
else the machine does meets both. Rounds before the first ten are left out: buffers are allocated in them.
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

WARM_UP_ROUNDS = 10
# Parameters in a model come in tensors of many sizes; a commit pays per tensor as well as per byte.
TENSORS = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=100, help="size of the whole state (default 100)")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default 30)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.size_mb, arguments.rounds)
        return
    print(
        f"state of {arguments.size_mb} MB in {TENSORS} parameters, {arguments.rounds} rounds; median (slowest) in ms\n"
    )
    print(f"{'workers':>7}  {'what':<22}{'Horovod':>16}{'edl_hvd':>16}{'ratio':>8}")
    for workers in (1, 2):
        times = run(workers, arguments.size_mb, arguments.rounds)
        for what in ("commit", "agreement alone"):
            stock, ours = times[f"horovod {what}"], times[f"edl_hvd {what}"]
            ratio = statistics.median(stock) / statistics.median(ours)
            print(f"{workers:>7}  {what:<22}{_shown(stock):>16}{_shown(ours):>16}{ratio:>8.1f}")


def _shown(times_s: list[float]) -> str:
    return f"{1e3 * statistics.median(times_s):.2f} ({1e3 * max(times_s):.1f})"


def run(workers: int, size_mb: int, rounds: int) -> dict[str, list[float]]:
    """Measure in ``workers`` processes; the times rank 0 saw, in seconds."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(workers), "-H", f"localhost:{workers}"]
    script = [sys.executable, __file__, "--worker", "--size-mb", str(size_mb), "--rounds", str(rounds)]
    done = subprocess.run([*launcher, "--network-interfaces", "lo", *script], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            times: dict[str, list[float]] = json.loads(line.partition("RESULT ")[2])
            return times
    raise SystemExit(f"the measurement with {workers} workers failed:\n{done.stdout}{done.stderr}")


def measure(size_mb: int, rounds: int) -> None:
    """In every worker: take turns, print rank 0's times."""
    import edl_hvd

    edl_hvd.init()
    model, optimizer = _build(size_mb)
    optimizer = edl_hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = edl_hvd.State(model=model, optimizer=optimizer)

    @edl_hvd.elastic
    def compare(state: edl_hvd.State) -> None:
        import horovod.torch as hvd

        stock_model, stock_optimizer = _build(size_mb)
        stock = hvd.elastic.TorchState(model=stock_model, optimizer=stock_optimizer, epoch=0, batch=0)
        session: Any = state._session
        times = _take_turns(
            {
                "horovod commit": stock.commit,
                "edl_hvd commit": state.commit,
                "horovod agreement alone": stock.check_host_updates,
                "edl_hvd agreement alone": session.agree,
            },
            rounds,
        )
        if edl_hvd.rank() == 0:
            print("RESULT " + json.dumps(times), flush=True)

    compare(state)


def _build(size_mb: int) -> tuple[Any, Any]:
    """A model and an SGD optimizer whose momentum exists, ``size_mb`` together."""
    import torch

    torch.set_num_threads(1)
    floats = size_mb * 1_000_000 // 4 // 2
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(floats // TENSORS)) for _ in range(TENSORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _take_turns(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    import torch

    import edl_hvd

    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, action in actions.items():
            edl_hvd.allreduce(torch.zeros(1))  # start together
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    return {name: series[WARM_UP_ROUNDS:] for name, series in times.items()}


if __name__ == "__main__":
    main()
