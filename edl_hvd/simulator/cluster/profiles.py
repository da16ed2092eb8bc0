"""What an application does on a placement with a batch: measured profiles, and lines between them.

The format and the formulas are those of the simulator of Pollux (Qiao et al., OSDI 2021; its artifact, Apache-2.0): for
each application step times by placement (placements.csv) and by size (scalability.csv), and one training for
each of several batch sizes (validation-<batch>.csv) with its gradient statistics by epoch.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from edl_hvd.errors import UsageError
from edl_hvd.simulator.cluster.blas import one_blas_thread

# Epochs that each application trains for, and the largest batch per GPU where it is not the largest one measured.
_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
_LARGEST_LOCAL_BATCH = {"yolov3": 8}
_MOST_HOSTS = 16
# More hosts were not measured; a job on more counts as on this many.


@dataclass(frozen=True)
class StepTime:
    """How long one optimizer step takes.

    Attributes:
        step_s: Seconds of the step, with summing gradients.
        sync_s: The part of them in which nothing is computed.
    """

    step_s: float
    sync_s: float

    @property
    def compute_s(self) -> float:
        return self.step_s - self.sync_s


@dataclass(frozen=True)
class GradientStatistics:
    """Squared norm and variance of gradients at the script's own batch; their ratio is the noise."""

    square: float
    variance: float


@dataclass(frozen=True)
class _Training:
    """One training with a fixed batch, by epoch."""

    progress: list[float]
    iterations: list[float]
    square: list[float]
    variance: list[float]


@dataclass
class Application:
    """One application's profile.

    Attributes:
        name: Name.
        trainings: The trainings that were measured, by batch.
        placements: Rows of (batch per GPU, step seconds, sync seconds), by placement as digits.
        scalability: Rows of (hosts, GPUs, batch per GPU, step seconds, sync seconds).
        epochs: Epochs that it trains for.
        largest_local_batch: Largest batch per GPU and pass.
    """

    name: str
    trainings: dict[int, _Training]
    placements: dict[int, list[tuple[int, float, float]]]
    scalability: list[tuple[int, int, int, float, float]]
    epochs: int
    largest_local_batch: int
    _steps: dict[tuple[tuple[int, ...], int], StepTime] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], GradientStatistics] = field(default_factory=dict)

    @cached_property
    def base_batch(self) -> int:
        """The script's own batch."""
        return min(self.trainings)

    @cached_property
    def largest_batch(self) -> int:
        """The largest global batch."""
        return max(self.trainings)

    @cached_property
    def smallest_local_batch(self) -> int:
        """The smallest batch per GPU and pass."""
        return min(row[0] for rows in self.placements.values() for row in rows)

    @cached_property
    def progress_at(self) -> list[float]:
        """Progress at the end of each number of epochs: the least of all trainings."""
        ends = range(min(len(training.progress) for training in self.trainings.values()))
        return [0.0, *(min(training.progress[epoch] for training in self.trainings.values()) for epoch in ends)]

    @property
    def total_progress(self) -> float:
        """Progress at the end of the training, in steps of the script's own batch."""
        return self.progress_at[self.epochs]

    def _around(self, batch: int) -> tuple[int, int]:
        below = max(known for known in self.trainings if known <= batch)
        above = min(known for known in self.trainings if known >= batch)
        return below, above

    def _between(self, batch: int, of: str, epoch: int) -> float:
        """A value of an epoch, on the line between the two batches that were measured."""
        below, above = self._around(batch)
        low: float = getattr(self.trainings[below], of)[epoch]
        high: float = getattr(self.trainings[above], of)[epoch]
        if below == above:
            return low
        return ((batch - below) * high + (above - batch) * low) / (above - below)

    def gradients(self, batch: int, epoch: int) -> GradientStatistics:
        """Gradient statistics in an epoch, with a global batch."""
        found = self._gradients.get((batch, epoch))
        if found is None:
            found = GradientStatistics(self._between(batch, "square", epoch), self._between(batch, "variance", epoch))
            self._gradients[batch, epoch] = found
        return found

    def iterations(self, batch: int, epoch: int) -> float:
        """Steps of a global batch after which an epoch has ended."""
        return self._between(batch, "iterations", epoch)

    def step(self, placement: Sequence[int], local_batch: int) -> StepTime:
        """The time of a step of one pass.

        Args:
            placement: GPUs on each host, in the order of its hosts; which host is the first does not matter.
            local_batch: Samples per GPU.

        Raises:
            UsageError: The profile does not reach that far.
        """
        turned = min(tuple(placement[turn:]) + tuple(placement[:turn]) for turn in range(len(placement)))
        found = self._steps.get((turned, local_batch))
        if found is None:
            rows = self.placements.get(int("".join(map(str, turned))))
            found = self._on_line(rows, local_batch) if rows else self._in_space(turned, local_batch)
            if found is None:
                raise UsageError(
                    f"the profile of {self.name} says nothing of {local_batch} samples per GPU on {list(turned)} GPUs; "
                    f"expected {self.smallest_local_batch} to {self.largest_local_batch} samples"
                )
            self._steps[turned, local_batch] = found
        return found

    def _on_line(self, rows: list[tuple[int, float, float]], local_batch: int) -> StepTime | None:
        if not rows[0][0] <= local_batch <= rows[-1][0]:
            return None
        place = min(max(bisect_left([row[0] for row in rows], local_batch), 1), len(rows) - 1)
        low, high = rows[place - 1], rows[place]
        part = local_batch - low[0]
        step_s, sync_s = ((high[of] - low[of]) / (high[0] - low[0]) * part + low[of] for of in (1, 2))
        return StepTime(step_s, sync_s)

    def _in_space(self, placement: tuple[int, ...], local_batch: int) -> StepTime | None:
        point = (min(len(placement), _MOST_HOSTS), sum(placement), local_batch)
        step_s, sync_s = (float(value) for value in self._interpolator([point])[0])
        return StepTime(step_s, sync_s) if step_s == step_s else None

    @cached_property
    def _interpolator(self) -> Any:
        """Linear interpolation over hosts, GPUs and batch per GPU, of all that was measured."""
        try:
            with one_blas_thread():
                from scipy.interpolate import LinearNDInterpolator
        except ImportError as error:
            raise UsageError(
                "simulating a cluster needs scipy; install it with: pip install 'edl-hvd[simulate]'"
            ) from error
        measured: defaultdict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        for digits, rows in self.placements.items():
            hosts, gpus = len(str(digits)), sum(map(int, str(digits)))
            for local_batch, step_s, sync_s in rows:
                measured[hosts, gpus, local_batch].append((step_s, sync_s))
        points: list[tuple[int, int, int]] = []
        values: list[tuple[float, float]] = []
        for key in sorted(measured):
            times = measured[key]
            points.append(key)
            values.append((sum(step for step, _ in times) / len(times), sum(sync for _, sync in times) / len(times)))
        points += [row[:3] for row in self.scalability]
        values += [row[3:] for row in self.scalability]
        return LinearNDInterpolator(points, values)


def read_application(folder: Path) -> Application:
    """Read the profile of an application from its folder, which has its name.

    Raises:
        UsageError: A file is missing, or is not of that form, or the application is none of Pollux's.
    """
    name = folder.name
    if name not in _EPOCHS:
        raise UsageError(f"application {name!r} is not known; expected one of {', '.join(sorted(_EPOCHS))}")
    try:
        trainings = {}
        for path in sorted(folder.glob("validation-*.csv")):
            rows = _rows(path)
            trainings[int(path.stem.partition("-")[2])] = _Training(
                *([float(row[column]) for row in rows] for column in ("progress", "iteration", "grad_sqr", "grad_var"))
            )
        placements: defaultdict[int, list[tuple[int, float, float]]] = defaultdict(list)
        for row in _rows(folder / "placements.csv"):
            placements[int(row["placement"])].append(
                (int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
            )
        scalability = [
            (int(row["num_nodes"]), int(row["num_replicas"]), int(row["local_bsz"]), float(row["step_time"]),
             float(row["sync_time"]))
            for row in _rows(folder / "scalability.csv")
        ]  # fmt: skip
        largest = max(row[0] for rows in placements.values() for row in rows)
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f"the profile of application {name!r} in {folder} cannot be read: {error}; expected placements.csv, "
            "scalability.csv and validation-<batch>.csv as in Pollux's artifact"
        ) from error
    if not trainings:
        raise UsageError(f"folder {folder} holds no validation-<batch>.csv; expected one for each batch")
    return Application(
        name, dict(sorted(trainings.items())), dict(placements), scalability, _EPOCHS[name],
        _LARGEST_LOCAL_BATCH.get(name, largest),
    )  # fmt: skip


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
