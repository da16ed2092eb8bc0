"""Draw a run: workers, teachers, throughput, loss and accuracy over time, with a mark for each resize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, not a window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from report import Report, Resize, throughput

INK, QUIET = "#1f2933", "#9aa5b1"
WORKERS, SPEED, LOSS, ACCURACY = "#4c6ef5", "#12b886", "#f76707", "#ae3ec9"
TEACHERS, JOINED = "#ae3ec9", "#2b8a3e"
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
    """Write the picture of a run as a PNG file; a run without teachers, losses or samples has no part for them."""
    parts: list[tuple[float, Callable[[Axes, Report], None]]] = [(1, _draw_workers)]
    if report.teachers is not None:
        parts += [(1, _draw_teachers), (1, _draw_lead_and_waiting)]
    if len(report.samples) > 1:
        parts.append((1.2, _draw_throughput))
    if report.losses:
        parts.append((1.6, _draw_loss_and_accuracy))
    with pyplot.rc_context(STYLE):
        heights = [height for height, _ in parts]
        figure, grid = pyplot.subplots(
            len(parts), 1, figsize=(11, 0.3 + 1.9 * sum(heights)), sharex=True, height_ratios=heights, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        for axes, (_, draw_part) in zip(grid[:, 0], parts, strict=True):
            draw_part(axes, report)
            _mark_resizes(axes, report.resizes, report.duration_s, named=draw_part is _draw_workers)
        grid[-1, 0].set_xlabel("seconds")
        grid[-1, 0].set_xlim(0, max(report.duration_s, 1.0))
        figure.align_ylabels(grid[:, 0])
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
    if not sizes:
        return
    axes.fill_between(times_s, [*sizes, sizes[-1]], step="post", color=WORKERS, alpha=0.25, linewidth=0)
    axes.step(times_s, [*sizes, sizes[-1]], where="post", color=WORKERS, linewidth=2)
    axes.set_ylabel("workers")
    axes.set_ylim(0, max(sizes) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_teachers(axes: Axes, report: Report) -> None:
    """The number of teachers that are ready, with a mark for each that is lost or joins."""
    history = report.teachers
    assert history is not None
    times_s = [time_s for time_s, _ in history.ready] + [report.duration_s]
    counts = [count for _, count in history.ready]
    counts.append(counts[-1])
    axes.fill_between(times_s, counts, step="post", color=TEACHERS, alpha=0.2, linewidth=0)
    axes.step(times_s, counts, where="post", color=TEACHERS, linewidth=2)
    ready_at = dict(history.ready)
    for moments, mark, color, name in (
        ([moment[0] for moment in history.joined], "^", JOINED, "joined"),
        ([moment[0] for moment in history.lost], "v", EVENT_COLORS["failure"], "lost"),
    ):
        if moments:
            at = [ready_at[moment_s] for moment_s in moments]
            axes.plot(moments, at, mark, color=color, markersize=6, label=f"{len(moments)} {name}", zorder=3)
    axes.set_ylabel("teachers ready")
    axes.set_ylim(0, max(counts) * 1.35 + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if history.joined or history.lost:
        axes.legend(loc="upper right", frameon=False, fontsize=8.5, ncols=2)


def _draw_lead_and_waiting(axes: Axes, report: Report) -> None:
    """A line for each worker and each while that it has told of."""
    history = report.teachers
    assert history is not None
    begins, ends = [look.begin_s for look in history.looks], [look.end_s for look in history.looks]
    most = max([1.0, *(look.window for look in history.looks)])
    axes.hlines([look.window for look in history.looks], begins, ends, color=QUIET, linewidth=1.5,
                label="micro-batches read")  # fmt: skip
    axes.hlines([look.lead for look in history.looks], begins, ends, color=SPEED, linewidth=2,
                label="of these, answered (lead)")  # fmt: skip
    axes.set_ylabel("lead", color=SPEED)
    axes.set_ylim(0, 1.35 * most)
    waiting = axes.twinx()
    waiting.grid(False)
    waiting.hlines([look.waited_share for look in history.looks], begins, ends, color=LOSS, linewidth=2,
                   linestyle=(0, (2, 1)))  # fmt: skip
    waiting.set_ylabel("time waited", color=LOSS)
    waiting.set_ylim(0, max([0.1, *(1.35 * look.waited_share for look in history.looks)]))
    waiting.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.legend(loc="upper right", frameon=False, fontsize=8.5, ncols=2)


def _draw_throughput(axes: Axes, report: Report) -> None:
    window_s = max(0.5, report.duration_s / 150)
    points = throughput(report.samples, window_s)
    axes.fill_between(*zip(*points, strict=True), color=SPEED, alpha=0.2, linewidth=0)
    axes.plot(*zip(*points, strict=True), color=SPEED, linewidth=1.5)
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_loss_and_accuracy(axes: Axes, report: Report) -> None:
    axes.plot(*zip(*report.losses, strict=True), color=LOSS, linewidth=1.5)
    axes.set_ylabel("training loss", color=LOSS)
    axes.set_ylim(bottom=0)
    if not report.validations:
        return
    accuracy = axes.twinx()
    accuracy.grid(False)
    times_s = [validation.time_s for validation in report.validations]
    accuracy.plot(times_s, [validation.top1 for validation in report.validations], "o-", color=ACCURACY, markersize=4)
    accuracy.set_ylabel("top-1 accuracy (validation)", color=ACCURACY)
    accuracy.set_ylim(0, 1.03)
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _mark_resizes(axes: Axes, resizes: list[Resize], duration_s: float, named: bool) -> None:
    before_s, is_lower = -duration_s, False
    for resize in resizes:
        color = EVENT_COLORS[resize.cause]
        axes.axvspan(resize.time_s - resize.seconds, resize.time_s, color=color, alpha=0.15, linewidth=0)
        axes.axvline(resize.time_s, color=color, linewidth=1, linestyle=(0, (4, 3)))
        if named:
            late = resize.time_s > 0.85 * duration_s  # no room to the right
            is_lower = resize.time_s - before_s < 0.15 * duration_s and not is_lower  # no room beside the one before
            before_s = resize.time_s
            axes.annotate(
                f"{describe(resize)}\n{resize.seconds:.2f} s lost",
                xy=(resize.time_s, axes.get_ylim()[1]), textcoords="offset points",
                xytext=(-4 if late else 4, -28 if is_lower else -2),
                ha="right" if late else "left", va="top", fontsize=8.5, color=color,
            )  # fmt: skip
