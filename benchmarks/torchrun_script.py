"""A training for ``torchrun``, for ``faults.py``: snapshots now and then, and every start goes on from the newest.

Every worker's trace is written as that of the fault tests' workers, by the same faults.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import Points

STEPS = 60
SNAPSHOT_EVERY = 5
PAUSE_S = 0.02


def main(folder: Path) -> None:
    points = Points(folder, lambda: RuntimeError)
    points.note("start")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    points.rank, points.size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 1)
    snapshot = folder / "snapshot.pt"
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    points.note("enter", rank=points.rank, size=points.size, step=step)
    while step < STEPS:
        points.step = step
        points.note("step", step=step, rank=points.rank, size=points.size)
        points.reach("step")
        features = torch.randn(8, 8)
        optimizer.zero_grad()
        (replica(features) - features.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        if points.rank == 0 and step % SNAPSHOT_EVERY == 0:
            part = snapshot.with_suffix(".part")
            torch.save({"step": step, "model": model.state_dict()}, part)
            part.replace(snapshot)
        time.sleep(PAUSE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
