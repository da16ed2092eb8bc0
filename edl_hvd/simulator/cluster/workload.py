"""When which jobs were submitted to a cluster: rows of ``name,time,application,num_replicas,batch_size``."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from edl_hvd.errors import UsageError
from edl_hvd.simulator.cluster.profiles import Application, read_application


@dataclass(frozen=True)
class SubmittedJob:
    """One row of a workload.

    Attributes:
        name: Name, unique in it.
        time_s: Moment of its submission.
        application: What it trains.
        gpus: GPUs that its user asks for.
        batch: Global batch that its user asks for.
    """

    name: str
    time_s: int
    application: Application
    gpus: int
    batch: int

    @property
    def family(self) -> str:
        """Name of the jobs that are alike: those of one application."""
        return self.application.name

    @property
    def chosen_batch(self) -> int | None:
        """Global batch that it keeps where a policy chooses its GPUs; ``None``: it chooses its own."""
        return self.application.largest_batch if self._is_of_one_gpu else None

    @property
    def most_gpus(self) -> int:
        """Most GPUs that it makes use of."""
        return 1 if self._is_of_one_gpu else self.application.largest_batch // self.application.smallest_local_batch

    @property
    def _is_of_one_gpu(self) -> bool:
        # The profile of this one says nothing of several GPUs.
        return self.application.name == "ncf"


@dataclass(frozen=True)
class Workload:
    """The jobs of a workload.

    Attributes:
        name: Name of its file, without its ending.
        jobs: Its rows, in their order.
    """

    name: str
    jobs: tuple[SubmittedJob, ...]


def read_workload(path: Path, profiles: Path | None = None) -> Workload:
    """Read a workload and the profiles of its applications.

    Args:
        path: The file.
        profiles: Folder of one folder per application; without it, ``profiles`` beside the folder of the file.

    Raises:
        UsageError: The file, or a profile, cannot be read.
    """
    folder = path.parent.parent / "profiles" if profiles is None else profiles
    applications: dict[str, Application] = {}
    jobs = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                name = row["application"]
                if name not in applications:
                    applications[name] = read_application(folder / name)
                gpus, batch = int(row["num_replicas"]), int(row["batch_size"])
                jobs.append(SubmittedJob(row["name"], int(row["time"]), applications[name], gpus, batch))
    except (OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"workload {path} cannot be read: {error}; expected a CSV file with the columns name, time, application, "
            "num_replicas and batch_size"
        ) from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"workload {path} has a row that is not understood: {error}; expected whole numbers"
        ) from error
    if not jobs:
        raise UsageError(f"workload {path} has no jobs; expected one in each row")
    return Workload(path.stem, tuple(jobs))
