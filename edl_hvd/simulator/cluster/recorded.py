"""Jobs of a production cluster, of which moment, duration and GPUs were recorded: how elastic they were is assumed.

Rows are those of ElasticFlow's traces (Gu et al., ASPLOS 2023; repository microsoft/elasticflow-traces):
``job_id,submission_time,duration,num_gpu``. A job's work is its duration times its speed on the GPUs that it ran on, by
a law of speed over GPUs. So on as many GPUs it takes as long as it did.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edl_hvd.errors import UsageError
from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.profiles import read_application
from edl_hvd.simulator.cluster.speedups import SpeedLaw, power_law, profile_law, speed_curve

COLUMNS = ("job_id", "submission_time", "duration", "num_gpu")
BY_GPU_HOURS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (1.0, ("cifar10", "ncf")),
    (10.0, ("bert", "deepspeech2")),
    (100.0, ("yolov3",)),
    (float("inf"), ("imagenet",)),
)
"""Applications of Pollux (section 5 of its paper), by the GPU-hours up to which a job counts as one of them."""
_ONE_GPU_ONLY = "ncf"
# Its profile is slower on several.


@dataclass(frozen=True)
class RecordedRow:
    """One row of a trace.

    Attributes:
        name: Name, unique in it.
        time_s: Moment of its submission.
        duration_s: Seconds for which it ran.
        gpus: GPUs that it ran on.
    """

    name: str
    time_s: int
    duration_s: float
    gpus: int


@dataclass(frozen=True)
class NamedLaw:
    """A law of speed over GPUs, and its name."""

    name: str
    law: SpeedLaw


LawOfJob: TypeAlias = Callable[[RecordedRow], NamedLaw]


@dataclass(frozen=True)
class RecordedJob:
    """A recorded job with a curve.

    Attributes:
        name: Name, unique in its trace.
        time_s: Moment of its submission.
        gpus: GPUs that its user asked for.
        duration_s: Seconds for which it ran on these.
        law: Name of its law of speed.
        curve: Speed over GPUs, up to the most that it may have.
        least: Fewest GPUs that it runs with.
    """

    name: str
    time_s: int
    gpus: int
    duration_s: float
    law: str
    curve: Curve
    least: int = 1

    @property
    def work(self) -> float:
        """Its work, in seconds of the speed 1."""
        return self.duration_s * self.curve.at(self.gpus)

    @property
    def batch(self) -> int | None:
        """It has none."""
        return None

    @property
    def family(self) -> str:
        """Name of the jobs that are alike; a trace does not say which are."""
        return ""

    @property
    def chosen_batch(self) -> int | None:
        """It has none."""
        return None

    @property
    def most_gpus(self) -> int:
        """Most GPUs that it may have."""
        return self.curve.sizes[-1]


@dataclass(frozen=True)
class RecordedWorkload:
    """The jobs of a trace.

    Attributes:
        name: Name of its file, without its ending.
        jobs: Its jobs, in the order of their submission.
    """

    name: str
    jobs: tuple[RecordedJob, ...]


def is_recorded(path: Path) -> bool:
    """Whether a file begins as a recorded trace does."""
    try:
        with path.open(newline="") as file:
            return COLUMNS[0] in next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def read_rows(path: Path) -> list[RecordedRow]:
    """Read a trace, in the order of submission.

    Raises:
        UsageError: The file cannot be read, or is not of that form.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                RecordedRow(row["job_id"], int(row["submission_time"]), float(row["duration"]), int(row["num_gpu"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"trace {path} cannot be read: {error}; expected a CSV file with the columns {', '.join(COLUMNS)}"
        ) from error
    except ValueError as error:
        raise UsageError(f"trace {path} has a row that is not understood: {error}; expected numbers") from error
    wrong = [row for row in rows if row.duration_s <= 0 or row.gpus < 1 or row.time_s < 0]
    if wrong:
        raise UsageError(
            f"trace {path} has job {wrong[0].name!r} of {wrong[0].duration_s:g} s on {wrong[0].gpus} GPUs; expected "
            "more than 0 of both, and a moment of at least 0"
        )
    if not rows:
        raise UsageError(f"trace {path} has no jobs; expected one in each row")
    if len({row.name for row in rows}) < len(rows):
        raise UsageError(f"trace {path} has a job twice; expected a name of its own for each row")
    return sorted(rows, key=lambda row: (row.time_s, row.name))


def law_named(name: str, profiles: Path | None = None, seed: int = 0) -> LawOfJob:
    """The laws that a name stands for.

    Args:
        name: A number p for n^p, 0 to 1; or "pollux": an application of Pollux for each job, see :func:`drawn_laws`.
        profiles: Folder of the applications' profiles, for "pollux".
        seed: Seed, for "pollux".

    Raises:
        UsageError: The name stands for nothing, or a profile cannot be read.
    """
    if name == "pollux":
        if profiles is None:
            raise UsageError("law 'pollux' needs the profiles of Pollux's applications; name their folder: --profiles")
        applications = [application for _, names in BY_GPU_HOURS for application in names]
        return drawn_laws({one: profile_law(read_application(profiles / one)) for one in applications}, seed)
    try:
        exponent = float(name)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 1:
        raise UsageError(f"law {name!r} is not known; expected a number from 0 to 1, or 'pollux'")
    return one_law(name, power_law(exponent))


def one_law(name: str, law: SpeedLaw) -> LawOfJob:
    """The same law for all jobs."""
    return lambda row: NamedLaw(name, law)


def drawn_laws(laws: Mapping[str, SpeedLaw], seed: int = 0) -> LawOfJob:
    """A law of an application of Pollux for each job, drawn among those of its GPU-hours.

    What is drawn for a job depends on the seed and on its name alone.

    Args:
        laws: Laws by the names of the applications.
        seed: Seed.
    """

    def law_of(row: RecordedRow) -> NamedLaw:
        hours = row.duration_s * row.gpus / 3600
        names = next(names for limit, names in BY_GPU_HOURS if hours < limit)
        if row.gpus > 1:
            names = tuple(name for name in names if name != _ONE_GPU_ONLY)
        name = random.Random(f"{seed} {row.name}").choice(names)
        return NamedLaw(name, laws[name])

    return law_of


def elastic(
    name: str, rows: list[RecordedRow], law_of: LawOfJob, slots: int,
    host_slots: int, stretch: float = 4.0, shrink: float = 0.0,
) -> RecordedWorkload:  # fmt: skip
    """Make elastic jobs of recorded ones.

    Args:
        name: Name of the workload.
        rows: Recorded jobs.
        law_of: Law of speed of a job.
        slots: GPUs of the cluster.
        host_slots: GPUs of each host.
        stretch: Most GPUs of a job, by those that its user asked for; at least 1.
        shrink: Fewest GPUs of a job, by those that its user asked for; at least one GPU.

    Raises:
        UsageError: A job asks for more GPUs than there are.
    """
    curves: dict[tuple[str, int], Curve] = {}
    jobs = []
    for row in rows:
        if row.gpus > slots:
            raise UsageError(f"job {row.name!r} asks for {row.gpus} GPUs, and the cluster has {slots}; expected fewer")
        law = law_of(row)
        most = row.gpus if law.name == _ONE_GPU_ONLY else min(slots, int(row.gpus * stretch))
        if (law.name, most) not in curves:
            curves[law.name, most] = speed_curve(law.law, most, host_slots)
        least = max(1, int(row.gpus * shrink))
        curve = curves[law.name, most]
        jobs.append(RecordedJob(row.name, row.time_s, row.gpus, row.duration_s, law.name, curve, least))
    return RecordedWorkload(name, tuple(jobs))
