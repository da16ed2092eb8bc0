"""Read from an event log what a run has shown: pure functions of the lines of ``edl_hvd.events.read_events``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from teacher_history import TeacherHistory, teacher_history

Line = dict[str, Any]


@dataclass(frozen=True)
class Resize:
    """A resize of the world.

    Attributes:
        time_s: Seconds from the start of the run until training went on.
        old_size, new_size: Number of workers before and after.
        cause: "failure" or "change".
        seconds: Seconds without training, measured on a worker that was there before and after.
        step: Optimizer step at which training went on.
        lost, left, joined: Workers, as ``host:local_rank``.
    """

    time_s: float
    old_size: int
    new_size: int
    cause: str
    seconds: float
    step: int
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validation:
    """One validation: the epoch it ended, seconds from the start of the run, and its result in [0, 1]."""

    epoch: int
    time_s: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Report:
    """All that the demo shows.

    Attributes:
        duration_s: Seconds from the first event to the last.
        ended: Whether the job reached its end.
        sizes: Size of the world over time, as (seconds, workers).
        resizes: Resizes in order of time.
        samples_per_epoch: Epoch number to the samples trained in it within the committed history.
        samples: Samples consumed over time, as (seconds, samples); committed history only.
        losses: Training loss over time, as (seconds, loss); committed history only.
        validations: One validation per epoch, in order.
        checkpoints: Number of checkpoints that became visible.
        teachers: What the job had of teachers; ``None`` if it had none.
    """

    duration_s: float
    ended: bool
    sizes: list[tuple[float, int]]
    resizes: list[Resize]
    samples_per_epoch: dict[int, int]
    samples: list[tuple[float, int]]
    losses: list[tuple[float, float]]
    validations: list[Validation]
    checkpoints: int
    teachers: TeacherHistory | None = None


def summarize(lines: Iterable[Line]) -> Report:
    """Read the report out of an event log that holds one run."""
    lines = list(lines)
    start_s = lines[0]["time"] if lines else 0.0
    history = committed_history(lines)
    metrics = [line for line in history if line["event"] == "metrics"]
    return Report(
        duration_s=lines[-1]["time"] - start_s if lines else 0.0,
        ended=any(line["event"] == "job_ended" for line in lines),
        sizes=[(line["time"] - start_s, line["size"]) for line in lines if line["event"] == "world_formed"],
        resizes=_resizes(lines, start_s),
        samples_per_epoch=samples_per_epoch(history),
        samples=[(line["time"] - start_s, line["samples"]) for line in history if line["event"] == "commit"],
        losses=[(line["time"] - start_s, line["values"]["loss"]) for line in metrics if "loss" in line["values"]],
        validations=_validations(metrics, start_s),
        checkpoints=sum(line["event"] == "checkpoint" for line in lines),
        teachers=teacher_history(lines, start_s),
    )


def committed_history(lines: Iterable[Line]) -> list[Line]:
    """The commits and metrics that the final state of the run grew from.

    Rank 0 logs a commit, then may die before another worker has made the same one. The next world starts at the
    newest commit that a survivor holds, which its ``world_formed`` line names. Lines beyond that step are undone and
    trained again, so they do not count.

    >>> commit = lambda step: {"event": "commit", "step": step}
    >>> undone = [commit(1), commit(2), commit(3), {"event": "world_formed", "step": 2}, commit(3)]
    >>> [line["step"] for line in committed_history(undone)]
    [1, 2, 3]
    """
    history: list[Line] = []
    for line in lines:
        if line["event"] in ("world_formed", "resized", "restore"):
            while history and history[-1]["step"] > line["step"]:
                history.pop()
        elif line["event"] in ("commit", "metrics"):
            history.append(line)
    return history


def samples_per_epoch(history: Iterable[Line]) -> dict[int, int]:
    """Samples trained in each epoch.

    A commit counts the samples of the whole run; what it adds to the commit before belongs to the epoch it was
    made in.

    >>> commit = lambda epoch, samples: {"event": "commit", "epoch": epoch, "samples": samples}
    >>> samples_per_epoch([commit(0, 0), commit(0, 64), commit(0, 100), commit(1, 164)])
    {0: 100, 1: 64}
    """
    counts: dict[int, int] = {}
    before = 0
    for line in history:
        if line["event"] == "commit":
            if line["samples"] != before:
                counts[line["epoch"]] = counts.get(line["epoch"], 0) + line["samples"] - before
            before = line["samples"]
    return counts


def throughput(samples: Sequence[tuple[float, int]], window_s: float) -> list[tuple[float, float]]:
    """Samples per second over time, as (middle of a window in seconds, samples per second).

    Between two commits the rate is taken as constant, so a stop shows as a dip as wide as the stop.
    """
    if len(samples) < 2:
        return []
    times_s, counts = zip(*samples, strict=True)
    edges_s = numpy.append(numpy.arange(times_s[0], times_s[-1], window_s), times_s[-1])
    rates = numpy.diff(numpy.interp(edges_s, times_s, counts)) / numpy.diff(edges_s)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    return list(zip(middles_s.tolist(), rates.tolist(), strict=True))


def final_top1(report: Report) -> float:
    """Top-1 accuracy of the last validation; 0 if there was none."""
    return report.validations[-1].top1 if report.validations else 0.0


def sizes_of(report: Report) -> tuple[int, ...]:
    """The number of workers of each world that trained, first to last."""
    first = tuple(size for _, size in report.sizes[:1])
    return first + tuple(resize.new_size for resize in report.resizes)


def arrows(sizes: Iterable[int]) -> str:
    """Sizes as text.

    >>> arrows((1, 2, 1))
    '1 → 2 → 1'
    """
    return " → ".join(map(str, sizes)) or "none"


def _validations(metrics: list[Line], start_s: float) -> list[Validation]:
    """The last validation of each epoch: one that a failure interrupted is repeated."""
    found = {}
    for line in metrics:
        if "top1" in line["values"]:
            values = line["values"]
            found[line["epoch"]] = Validation(line["epoch"], line["time"] - start_s, values["top1"], values["top5"])
    return list(found.values())


def _resizes(lines: list[Line], start_s: float) -> list[Resize]:
    """One entry per ``resized`` line, with the names of workers that joined and left."""
    resizes = []
    worlds = [line for line in lines if line["event"] == "world_formed"]
    members: dict[int, list[str]] = {line["generation"]: line["members"] for line in worlds}
    trained_with = next(iter(members.values()), [])
    trained_in = 0
    for line in lines:
        if line["event"] != "resized":
            continue
        generation = line["generation"]
        now = members[generation]
        resizes.append(
            Resize(
                time_s=line["time"] - start_s,
                old_size=line["old_size"],
                new_size=line["new_size"],
                cause=line["cause"],
                seconds=line["downtime_s"],
                step=line["step"],
                lost=_workers(lines, "worker_lost", trained_in + 1, generation),
                left=_workers(lines, "worker_left", trained_in, generation - 1),
                joined=tuple(name for name in now if name not in trained_with),
            )
        )
        trained_with, trained_in = now, generation
    return resizes


def _workers(lines: list[Line], event: str, first: int, last: int) -> tuple[str, ...]:
    """Workers named by ``event`` in the generations from ``first`` to ``last``; a leaver's line may come late."""
    return tuple(line["worker"] for line in lines if line["event"] == event and first <= line["generation"] <= last)
