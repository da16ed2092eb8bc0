"""What a commit and a checkpoint cost the training, beside what others offer for the same, on the same state.

    python benchmarks/checkpoint.py [--states 100:sgd 1000:sgd 4000:adam] [--rounds 20] [--folder DIR] [--device cuda]

Two workers on this machine, or one where two have no room for the state, under horovodrun. Each row is how long
training stands still for it, in milliseconds on rank 0: the median and the slowest, and the ratio to one copy of the
state in memory.

    memory copy              the whole state into memory that is kept
    Horovod commit           hvd.elastic.TorchState.commit
    edl_hvd commit           between two batches, after an optimizer step
    edl_hvd commit, copying  as for a script that moves parameters itself
    edl_hvd checkpoint       the commit with which one begins; it is copied beside the next batch, then written
    ... and a next step      that, with the rest of the copy that the next optimizer step finds to do after a batch
    ... and a step at once   the same without a batch to compute
    torch.save               of the same state, to the same folder
    DCP async_save           torch.distributed.checkpoint; it is written in the background, too

An optimizer step comes before each, as in training: a copy also has to push what the step has just written out of the
processor's caches. What fits into memory together takes turns, in random order, so that whatever the machine does meets
all; large states are measured one row after the other, and a row that does not fit is left out. The first rounds are
not counted: memory is allocated in them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

# Parameters in a model come in tensors of many sizes; a commit pays per tensor as well as per byte.
TENSORS = 160
# How long a batch takes: a few times as long as a copy of the state.
BATCH_BYTES_PER_S = 1.5e9
# Of a larger state, not all the copies of two workers fit into a small machine at once.
TOGETHER_MB = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", nargs="+", default=["100:sgd", "1000:sgd", "4000:adam"], metavar="MB:OPTIMIZER",
                        help="sizes of the whole state in MB, with sgd (momentum) or adam")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds of a small state (default 20)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the state; one worker with cuda")
    parser.add_argument("--folder", type=Path, help="where files are written (default: a temporary folder)")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.states[0], arguments.worker, arguments.rounds, arguments.folder, arguments.device)
        return
    for state in arguments.states:
        size_mb = int(state.partition(":")[0])
        together = size_mb <= TOGETHER_MB
        rounds = arguments.rounds if size_mb <= 200 else max(3, arguments.rounds // 4)
        times: dict[str, list[float]] = {}
        for rows in [list(PREPARED)] if together else [[row] for row in PREPARED if fits(row, size_mb)]:
            times |= run(state, rows, rounds, arguments.folder, arguments.device)
        show(state, times, arguments.device)


def fits(row: str, size_mb: int) -> bool:
    """Whether the workers have the memory for it."""
    # The state itself, the commit with which the elastic function begins, and what the row keeps.
    copies = {
        "Horovod commit": 4.0,
        "edl_hvd commit": 2.0,
        "edl_hvd commit, copying": 2.0,
        "torch.save": 2.0,
    }
    return workers_of(size_mb) * copies.get(row, 3.0) * size_mb * 1e6 < 0.95 * psutil.virtual_memory().available


def workers_of(size_mb: int, device: str = "cpu") -> int:
    """Two, where both have room for three copies of the state; else one, whose copies take as long."""
    return 2 if device == "cpu" and 2 * 3 * size_mb * 1e6 < 0.8 * psutil.virtual_memory().total else 1


def show(state: str, times_s: dict[str, list[float]], device: str) -> None:
    copy_s = statistics.median(times_s.get("memory copy", [math.nan]))
    workers = "two workers" if workers_of(int(state.partition(":")[0]), device) == 2 else "one worker"
    print(f"\n{state.replace(':', ' MB, ')}, {device}, {workers}, {max(map(len, times_s.values()), default=0)} rounds")
    print(f"  {'':<24}{'median':>10}{'slowest':>10}{'copies':>9}")
    for row in PREPARED:
        if row not in times_s:
            print(f"  {row:<24}{'does not fit':>10}")
            continue
        median_s = statistics.median(times_s[row])
        print(
            f"  {row:<24}{1e3 * median_s:>10.2f}{1e3 * max(times_s[row]):>10.1f}{median_s / copy_s:>9.2f}", flush=True
        )


def run(state: str, rows: list[str], rounds: int, folder: Path | None, device: str) -> dict[str, list[float]]:
    """Measure some rows in one or two processes; the times rank 0 saw, in seconds."""
    workers = workers_of(int(state.partition(":")[0]), device)
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", f"{workers}", "-H", f"localhost:{workers}"]
    with tempfile.TemporaryDirectory(dir=folder, prefix="edl_hvd-") as own:
        script = [
            sys.executable,
            __file__,
            "--states",
            state,
            "--rounds",
            str(rounds),
            "--folder",
            own,
            "--device",
            device,
        ]
        done = subprocess.run([*launcher, "--network-interfaces", "lo", *script, "--worker", *rows],
                              capture_output=True, text=True, check=False,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        try:
            times: dict[str, list[float]] = json.loads((Path(own) / "times.json").read_text())
        except FileNotFoundError:
            raise SystemExit(f"the measurement failed:\n{done.stdout}{done.stderr}") from None
        return times


def measure(state_name: str, rows: list[str], rounds: int, folder: Path, device: str) -> None:
    """In every worker: let the rows take turns, write down rank 0's times."""
    import torch

    import edl_hvd

    torch.set_num_threads(1)
    edl_hvd.init()
    size, _, kind = state_name.partition(":")
    model, optimizer = build(int(size), kind, device)
    state = edl_hvd.State(model=model, optimizer=optimizer)

    @edl_hvd.elastic(checkpoint=str(folder / "edl_hvd"), checkpoint_every="1000000s", keep_newest=1)
    def compare(state: edl_hvd.State) -> None:
        actions = {row: PREPARED[row](state, folder) for row in rows}
        times = take_turns(actions, rounds)
        if edl_hvd.rank() == 0:
            (folder / "times.json").write_text(json.dumps(times))
        edl_hvd.barrier()  # the launcher ends all when one ends
        os._exit(0)  # without a last checkpoint

    compare(state)


def build(size_mb: int, kind: str, device: str) -> tuple[Any, Any]:
    """A model and an optimizer whose own state exists, ``size_mb`` together, wrapped by edl_hvd."""
    import torch

    import edl_hvd

    copies = {"sgd": 2, "adam": 3}[kind]
    elements = size_mb * 1_000_000 // 4 // copies // TENSORS
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(TENSORS)])
    plain = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-6),
    }[kind]()
    optimizer = edl_hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    gradient = torch.ones(elements, device=device)
    for parameter in model.parameters():
        parameter.grad = gradient  # one for all: what is measured does not read them
    step(optimizer)
    return model, optimizer


def step(optimizer: Any) -> None:
    """The optimizer's step, without summing gradients first."""
    optimizer.stepping.round_number = optimizer.reduction.round_number - 1  # as if they were summed
    optimizer.step()


# --- the rows: each returns what is done before the clock starts, and what is measured ---

Action = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]


def nothing() -> None:
    pass


def memory_copy(state: Any, folder: Path) -> Action:
    import torch

    live = list(state._runtime.store.live(0)[1].values())
    kept = [torch.empty_like(tensor) for tensor in live]
    return lambda: step(state.optimizer), lambda: torch._foreach_copy_(kept, live), nothing


def horovod_commit(state: Any, folder: Path) -> Action:
    import horovod.torch as hvd

    if not hvd.is_initialized():
        hvd.init()  # edl_hvd needs no Horovod to be alone
    stock = hvd.elastic.TorchState(model=state.model, optimizer=state.optimizer, epoch=0, batch=0)
    return lambda: step(state.optimizer), stock.commit, nothing


def light_commit(state: Any, folder: Path) -> Action:
    from edl_hvd.worker.training.round_message import Vote

    def commit() -> None:
        state._runtime.commit_step(Vote())

    for _ in range(3):
        step(state.optimizer)
        commit()
    return lambda: step(state.optimizer), commit, nothing


def copying_commit(state: Any, folder: Path) -> Action:
    return lambda: step(state.optimizer), state.commit, nothing


def checkpoint(state: Any, folder: Path, then: str = "") -> Action:
    import torch

    import edl_hvd
    from edl_hvd.worker.training.round_message import Vote

    commits: Any = state._runtime.coordinator
    due = Vote(checkpoint=1.0)

    def begin() -> None:
        state._runtime.commit_step(due)

    def begin_and_step() -> None:
        begin()
        before_step()

    def begin_compute_and_step() -> float:
        started = time.perf_counter()
        begin()
        begun = time.perf_counter()
        while time.perf_counter() < begun + batch_s:
            matrix @ matrix
        computed = time.perf_counter()
        before_step()
        return begun - started + time.perf_counter() - computed

    def before_step() -> None:
        state.optimizer.stepping.before.call(state.optimizer, False)

    def written() -> None:
        while edl_hvd.allreduce(torch.tensor([float(commits._checkpoints.busy)]), op="sum").item():
            time.sleep(0.01)
        commits._checkpoints.report()
        assert commits._checkpoints.written_step in (-1, state._runtime.store.step), "the checkpoint failed"
        commits._writers_busy = False

    def before() -> None:
        step(state.optimizer)
        state._runtime.store.step += 1

    matrix, batch_s = torch.rand(300, 300), state._runtime.store.size_bytes / BATCH_BYTES_PER_S
    light_commit(state, folder)
    action = {"": begin, "a step": begin_and_step, "a batch": begin_compute_and_step}[then]
    return before, action, written


def torch_save(state: Any, folder: Path) -> Action:
    import torch

    import edl_hvd

    def save() -> None:
        if edl_hvd.rank() == 0:
            torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, folder / "saved")

    return lambda: step(state.optimizer), save, nothing


def dcp_async_save(state: Any, folder: Path) -> Action:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import edl_hvd

    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=edl_hvd.rank(), world_size=edl_hvd.size())
    under_way: list[Any] = []

    def save() -> None:
        tensors = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        under_way.append(dcp.async_save(tensors, checkpoint_id=str(folder / "dcp")))

    def written() -> None:
        under_way.pop().result()
        dist.barrier()
        if edl_hvd.rank() == 0:
            shutil.rmtree(folder / "dcp")

    return lambda: step(state.optimizer), save, written


PREPARED: dict[str, Callable[[Any, Path], Action]] = {
    "memory copy": memory_copy,
    "Horovod commit": horovod_commit,
    "edl_hvd commit": light_commit,
    "edl_hvd commit, copying": copying_commit,
    "edl_hvd checkpoint": checkpoint,
    "... and a next step": partial(checkpoint, then="a batch"),
    "... and a step at once": partial(checkpoint, then="a step"),
    "torch.save": torch_save,
    "DCP async_save": dcp_async_save,
}


def take_turns(actions: dict[str, Action], rounds: int) -> dict[str, list[float]]:

    import torch

    import edl_hvd

    finish_kernels = torch.cuda.synchronize if torch.cuda.is_available() else nothing
    warm_up = max(2, rounds // 4)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warm_up + rounds):
        # In another order each time, the same on every rank: what was written by one row may still keep the machine
        # busy in the next.
        for name in random.Random(number).sample(list(actions), len(actions)):
            before, action, after = actions[name]
            before()
            finish_kernels()
            edl_hvd.barrier()  # start together
            started = time.perf_counter()
            own = action()
            finish_kernels()
            times[name].append(own if isinstance(own, float) else time.perf_counter() - started)
            after()
    return {name: series[warm_up:] for name, series in times.items()}


if __name__ == "__main__":
    main()
