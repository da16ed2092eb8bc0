"""Made-up profiles and workloads in the format of Pollux's artifact, and where the real ones lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read once, because tests run without the settings of who started them.
_NAMED = os.environ.get("EDL_HVD_CLUSTER_DATA")
EPOCHS = {"bert": 2, "ncf": 10}


def cluster_data() -> Path:
    """The folder of recorded workloads; the test is skipped where there is none."""
    folder = Path(_NAMED) if _NAMED else Path(__file__).parents[3] / "shared" / "data" / "cluster"
    if not folder.is_dir():
        pytest.skip("EDL_HVD_CLUSTER_DATA does not name a folder of recorded workloads")
    return folder


def write_profile(folder: Path, name: str, epoch_steps: int = 2_000) -> None:
    """A profile that follows from a formula: steps of 0.1 s and more, which summing makes longer."""
    folder = folder / name
    folder.mkdir(parents=True)
    batches = (16, 32, 64)
    for place, local in enumerate((16, 64, 256)):
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in range(1, EPOCHS[name] + 1):
            noise = 4.0 + epoch
            rows.append(f"{epoch * epoch_steps * (1 + place / 1000)},{epoch * epoch_steps // 4**place},0.5,1.0,{noise}")
        (folder / f"validation-{local}.csv").write_text("\n".join(rows) + "\n")

    def times(hosts: int, gpus: int, local: int) -> str:
        sync_s = 0.0 if gpus == 1 else (0.01 if hosts == 1 else 0.05) + 0.001 * gpus
        return f"{0.05 + 0.004 * local + sync_s},{sync_s}"

    placements = [("1", 1, 1), ("2", 1, 2), ("3", 1, 3), ("4", 1, 4), ("11", 2, 2), ("44", 2, 8), ("22", 2, 4)]
    rows = [
        f"{digits},{local},{times(hosts, gpus, local)}" for digits, hosts, gpus in placements for local in (4, *batches)
    ]
    (folder / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n" + "\n".join(rows) + "\n")
    sizes = [(1, 1), (16, 16), (16, 64), (4, 16), (8, 16), (1, 4), (3, 3)]
    rows = [
        f"{hosts},{gpus},{local},{times(hosts, gpus, local)}" for hosts, gpus in sizes for local in (1, 4, *batches)
    ]
    (folder / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n" + "\n".join(rows))


def write_workload(path: Path, rows: list[tuple[int, str, int, int]]) -> Path:
    """A workload of jobs with a moment, an application, GPUs and a batch."""
    lines = ["name,time,application,num_replicas,batch_size"]
    lines += [
        f"{name}-{number},{time_s},{name},{gpus},{batch}" for number, (time_s, name, gpus, batch) in enumerate(rows)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
