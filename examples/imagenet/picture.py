"""Draw a run: workers, throughput, loss and accuracy over time, with a mark for each resize."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, not a window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from report import Report, Resize, throughput

INK, QUIET = "#1f2933", "#9aa5b1"
WORKERS, SPEED, LOSS, ACCURACY = "#4c6ef5", "#12b886", "#f76707", "#ae3ec9"
EVENT_COLORS = {"failure": "#e03131", "change": "#495057"}
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
}


def draw(report: Report, path: Path, title: str) -> None:
    """Write the picture of a run as a PNG file."""
    with pyplot.rc_context(STYLE):
        figure, (workers, speed, loss) = pyplot.subplots(
            3, 1, figsize=(11, 7.5), sharex=True, height_ratios=(1, 1.2, 1.6), layout="constrained"
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        _draw_workers(workers, report)
        _draw_throughput(speed, report)
        _draw_loss_and_accuracy(loss, report)
        for axes in (workers, speed, loss):
            _mark_resizes(axes, report.resizes, report.duration_s, named=axes is workers)
        loss.set_xlabel("seconds")
        loss.set_xlim(0, report.duration_s)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def describe(resize: Resize) -> str:
    """Describe a resize in a few words.

    >>> describe(Resize(9.0, 2, 1, "failure", 0.2, 40, lost=("localhost:0",)))
    'localhost:0 died'
    """
    parts = [
        f"{' and '.join(names)} {verb}"
        for names, verb in ((resize.lost, "died"), (resize.left, "left"), (resize.joined, "joined"))
        if names
    ]
    return ", ".join(parts) or resize.cause


def _draw_workers(axes: Axes, report: Report) -> None:
    times_s = [time_s for time_s, _ in report.sizes] + [report.duration_s]
    sizes = [size for _, size in report.sizes]
    axes.fill_between(times_s, [*sizes, sizes[-1]], step="post", color=WORKERS, alpha=0.25, linewidth=0)
    axes.step(times_s, [*sizes, sizes[-1]], where="post", color=WORKERS, linewidth=2)
    axes.set_ylabel("workers")
    axes.set_ylim(0, max(sizes) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_throughput(axes: Axes, report: Report) -> None:
    window_s = max(0.5, report.duration_s / 150)
    points = throughput(report.samples, window_s)
    axes.fill_between(*zip(*points, strict=True), color=SPEED, alpha=0.2, linewidth=0)
    axes.plot(*zip(*points, strict=True), color=SPEED, linewidth=1.5)
    axes.set_ylabel("images per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_loss_and_accuracy(axes: Axes, report: Report) -> None:
    axes.plot(*zip(*report.losses, strict=True), color=LOSS, linewidth=1.5)
    axes.set_ylabel("training loss", color=LOSS)
    axes.set_ylim(bottom=0)
    accuracy = axes.twinx()
    accuracy.grid(False)
    times_s = [validation.time_s for validation in report.validations]
    accuracy.plot(times_s, [validation.top1 for validation in report.validations], "o-", color=ACCURACY, markersize=4)
    accuracy.set_ylabel("top-1 accuracy (validation)", color=ACCURACY)
    accuracy.set_ylim(0, 1.03)
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _mark_resizes(axes: Axes, resizes: list[Resize], duration_s: float, named: bool) -> None:
    for resize in resizes:
        color = EVENT_COLORS[resize.cause]
        axes.axvspan(resize.time_s - resize.seconds, resize.time_s, color=color, alpha=0.15, linewidth=0)
        axes.axvline(resize.time_s, color=color, linewidth=1, linestyle=(0, (4, 3)))
        if named:
            late = resize.time_s > 0.85 * duration_s  # no room to the right
            axes.annotate(
                f"{describe(resize)}\n{resize.seconds:.2f} s lost",
                xy=(resize.time_s, axes.get_ylim()[1]), xytext=(-4 if late else 4, -2), textcoords="offset points",
                ha="right" if late else "left", va="top", fontsize=8.5, color=color,
            )  # fmt: skip
