"""What the workers of the demo have noted, read back: pure functions of their lines, and a picture of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, not a window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

INK, QUIET, LOST, ADDED = "#1f2933", "#9aa5b1", "#e03131", "#2b8a3e"
WORKERS, TEACHERS, SPEED, ACCURACY = "#4c6ef5", "#ae3ec9", "#12b886", "#f76707"
STYLE: Any = {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": QUIET, "axes.grid": True,
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid.axis": "y", "grid.color": "#e4e7eb",
         "axes.axisbelow": True}  # fmt: skip
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A micro-batch that counts: its samples in order, and the digest of the answer that it was learned with."""

    indices: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Step:
    """A step of the history that counts.

    Attributes:
        number: Its number, from 0.
        at_s: When its last worker had computed its part, in seconds since 1970.
        size: Number of workers.
        parts: Micro-batches of all workers, in order of their samples.
    """

    number: int
    at_s: float
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Look:
    """What the job's status said at a moment, in seconds since 1970: answers that lie ready, of how many, from whom."""

    at_s: float
    lead: int
    window: int
    teachers: int


@dataclass(frozen=True)
class Mark:
    """Something that befell the job, in seconds since 1970."""

    at_s: float
    what: str
    is_loss: bool


@dataclass(frozen=True)
class Story:
    """What the picture shows.

    Attributes:
        steps: Steps that count.
        looks: What the status said over time.
        marks: What befell the job.
        accuracies: Accuracy in [0, 1] after each epoch, by the name of the run.
        speeds: Samples per second of the jobs that ran side by side, by name.
    """

    steps: Sequence[Step]
    looks: Sequence[Look]
    marks: Sequence[Mark]
    accuracies: Mapping[str, Sequence[float]]
    speeds: Mapping[str, float]


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a job's workers; a worker that was killed may have left half a line."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def counted_steps(lines: Iterable[Line]) -> list[Step]:
    """The steps that count: of several tries of a step, that of the newest world.

    >>> note = lambda generation, index: {
    ...     "step": 0, "generation": generation, "size": 1, "at_s": 5.0, "taken": [{"indices": [index], "answer": "a"}]}
    >>> counted_steps([note(1, 7), note(2, 8)])
    [Step(number=0, at_s=5.0, size=1, parts=(Part(indices=(8,), answer='a'),))]
    """
    tries: dict[int, dict[int, list[Line]]] = {}
    for line in lines:
        if "step" in line:
            tries.setdefault(line["step"], {}).setdefault(line["generation"], []).append(line)
    steps = []
    for number in sorted(tries):
        newest = tries[number][max(tries[number])]
        parts = [Part(tuple(one["indices"]), one["answer"]) for line in newest for one in line["taken"]]
        at_s, size = max(line["at_s"] for line in newest), newest[0]["size"]
        steps.append(Step(number, at_s, size, tuple(sorted(parts, key=lambda part: part.indices))))
    return steps


def sizes(steps: Iterable[Step]) -> tuple[int, ...]:
    """The sizes of the worlds, one after the other."""
    found: list[int] = []
    for step in steps:
        if found[-1:] != [step.size]:
            found.append(step.size)
    return tuple(found)


def whole_epochs(steps: Sequence[Step], samples: int, steps_per_epoch: int) -> int:
    """The number of epochs that have each sample once, and no other."""
    epochs: dict[int, list[int]] = {}
    for step in steps:
        taken = epochs.setdefault(step.number // steps_per_epoch, [])
        taken += [index for part in step.parts for index in part.indices]
    return sum(sorted(taken) == list(range(samples)) for taken in epochs.values())


def samples_per_s(steps: Sequence[Step], begin_s: float, end_s: float) -> float:
    """Samples per second of the steps between two moments; 0 if there are fewer than two.

    >>> steps = [Step(number, number * 0.5, 1, (Part((1, 2), ""),)) for number in range(10)]
    >>> samples_per_s(steps, 1.0, 3.0)
    4.0
    """
    inside = [step for step in steps if begin_s <= step.at_s <= end_s]
    if len(inside) < 2 or inside[-1].at_s <= inside[0].at_s:
        return 0.0
    samples = sum(len(part.indices) for step in inside[1:] for part in step.parts)
    return samples / (inside[-1].at_s - inside[0].at_s)


def accuracies(lines: Iterable[Line]) -> list[float]:
    """The accuracy after each epoch; the last one counts if an epoch's end came twice."""
    found = {line["epoch"]: float(line["accuracy"]) for line in lines if "accuracy" in line}
    return [found[epoch] for epoch in sorted(found)]


def draw(story: Story, path: Path) -> None:
    """Write the picture as a PNG file."""
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(12, 7.5), layout="constrained")
        grid = figure.add_gridspec(3, 2, width_ratios=(2.2, 1))
        figure.suptitle("Students resize and teachers die: the same answers, each once", x=0.01, ha="left",
                        fontsize=13, fontweight="bold")  # fmt: skip
        begin_s = story.steps[0].at_s
        people = figure.add_subplot(grid[0, 0])
        lead, speed = figure.add_subplot(grid[1, 0], sharex=people), figure.add_subplot(grid[2, 0], sharex=people)
        _draw_counts(people, story, begin_s)
        _draw_lead(lead, story, begin_s)
        _draw_speed(speed, story, begin_s)
        for axes in (people, lead, speed):
            for mark in story.marks:
                axes.axvline(mark.at_s - begin_s, color=LOST if mark.is_loss else ADDED, linewidth=1, linestyle="--")
        for mark in story.marks:
            people.annotate(
                mark.what, (mark.at_s - begin_s, people.get_ylim()[1]), (3, -1), textcoords="offset points",
                va="top", fontsize=8, color=LOST if mark.is_loss else ADDED,
            )  # fmt: skip
        speed.set_xlabel("seconds")
        people.set_xlim(0, story.steps[-1].at_s - begin_s)
        _draw_bars(figure.add_subplot(grid[0, 1]), story.speeds)
        _draw_accuracies(figure.add_subplot(grid[1:, 1]), story.accuracies)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _draw_counts(axes: Axes, story: Story, begin_s: float) -> None:
    at_s = [step.at_s - begin_s for step in story.steps]
    axes.step(at_s, [step.size for step in story.steps], where="post", color=WORKERS, label="workers")
    axes.step([look.at_s - begin_s for look in story.looks], [look.teachers for look in story.looks], where="post",
              color=TEACHERS, label="teachers in use")  # fmt: skip
    most = max([2, *(look.teachers for look in story.looks)])
    axes.set(ylim=(0, most * 1.8), ylabel="processes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", frameon=False, fontsize=8, bbox_to_anchor=(1, 0.78), ncols=2)


def _draw_lead(axes: Axes, story: Story, begin_s: float) -> None:
    at_s = [look.at_s - begin_s for look in story.looks]
    axes.step(at_s, [look.window for look in story.looks], where="post", color=QUIET, label="micro-batches read")
    axes.fill_between(at_s, [look.lead for look in story.looks], step="post", color=SPEED, alpha=0.4,
                      label="of these, with an answer (lead)")  # fmt: skip
    axes.set(ylim=(0, 1.25 * max([8, *(look.window for look in story.looks)])), ylabel="window")
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2)


def _draw_speed(axes: Axes, story: Story, begin_s: float) -> None:
    end_s, wide_s = story.steps[-1].at_s, 2.0
    moments = [begin_s + wide_s * number for number in range(int((end_s - begin_s) / wide_s))]
    rates = [samples_per_s(story.steps, moment, moment + wide_s) for moment in moments]
    axes.plot([moment + wide_s / 2 - begin_s for moment in moments], rates, color=SPEED)
    axes.set(ylim=(0, None), ylabel="samples per second")


def _draw_bars(axes: Axes, speeds: Mapping[str, float]) -> None:
    names = list(speeds)
    bars = axes.barh(names, [speeds[name] for name in names], color=[QUIET, SPEED, LOST][: len(names)])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlim=(0, 1.2 * max(speeds.values())), title="Samples per second, side by side")
    axes.xaxis.set_visible(False)


def _draw_accuracies(axes: Axes, runs: Mapping[str, Sequence[float]]) -> None:
    looks = ((ACCURACY, "-"), (WORKERS, ":"), (QUIET, "-"))  # the first two lie on each other
    for (name, found), (colour, line) in zip(runs.items(), looks, strict=False):
        axes.plot(range(1, len(found) + 1), found, line, color=colour, label=f"{name}: {found[-1]:.1%}")
    axes.set(xlabel="epoch", title="Accuracy on other writers' digits")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylim(0.6, 1.0)
    axes.legend(loc="lower right", frameon=False)
