"""Draw a comparison: hosts and goodput over time, and the host-hours without useful work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl_hvd.errors import UsageError
from edl_hvd.simulator.comparison import Comparison
from edl_hvd.simulator.timeline import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"restart": "restart from checkpoints", "horovod": "stock Horovod elastic", "edl_hvd": "edl_hvd"}
_COLORS = {"restart": "#f08c00", "horovod": "#9c36b5", "edl_hvd": "#0ca678"}
_INK, _QUIET, _HOSTS = "#1f2933", "#9aa5b1", "#4c6ef5"
_STYLE: Any = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
}


def draw(comparison: Comparison, path: str, title: str) -> None:
    """Write the picture as a PNG file.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # a file, not a window
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a picture needs matplotlib; install it with: pip install 'edl-hvd[report]'") from error
    hours = comparison.plan.trace.end_s / 3600
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        FigureCanvasAgg(figure)
        hosts, goodput, missed = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.5, 1.3))
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        _draw_hosts(hosts, comparison)
        _draw_goodput(goodput, comparison)
        _draw_missed(missed, comparison)
        missed.set_xlabel("hours")
        missed.set_xlim(0, hours)
        figure.align_ylabels()
        try:
            figure.savefig(Path(path), dpi=150, format="png")
        except OSError as error:
            raise UsageError(f"cannot write the picture {path}: {error.strerror}") from error


def _draw_hosts(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import MaxNLocator

    trace = comparison.plan.trace
    times = [time_s / 3600 for time_s, _ in trace.counts] + [trace.end_s / 3600]
    counts = [count for _, count in trace.counts]
    counts.append(counts[-1])
    axes.fill_between(times, counts, step="post", color=_HOSTS, alpha=0.2, linewidth=0)
    axes.step(times, counts, where="post", color=_HOSTS, linewidth=1.2)
    axes.set_ylabel("hosts")
    axes.set_ylim(0, max(counts) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _draw_goodput(axes: Axes, comparison: Comparison) -> None:
    """Draw the goodput of each window; there is a gap where no host was present."""
    lowest = 1.0
    for system, result in comparison.results.items():
        points = [(time_s / 3600, value) for time_s, value in result.curve]
        known = [value for _, value in points if value is not None]
        lowest = min([lowest, *known])
        values = [float("nan") if value is None else 100 * value for _, value in points]
        label = f"{NAMES[system]}: {100 * result.goodput:.2f} %"
        times = [time for time, _ in points]
        axes.step(times, values, where="pre", color=_COLORS[system], linewidth=1.3, label=label)
    window_min = comparison.plan.trace.end_s / len(points) / 60
    axes.set_ylabel(f"goodput, %\n(windows of {_minutes(window_min)})")
    axes.set_ylim(max(0.0, 100 * lowest - 4), 101)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, borderaxespad=0.2)


def _draw_missed(axes: Axes, comparison: Comparison) -> None:
    for system, result in comparison.results.items():
        times, sums = _missed(result, comparison)
        axes.plot(times, sums, color=_COLORS[system], linewidth=1.6)
        axes.annotate(
            f"{sums[-1]:.3g} h", (times[-1], sums[-1]), xytext=(4, 0), textcoords="offset points", va="center",
            color=_COLORS[system], fontsize=9, annotation_clip=False,
        )  # fmt: skip
    axes.set_ylabel("host-hours without\nuseful work, so far")
    axes.set_ylim(bottom=0)


def _missed(result: Result, comparison: Comparison) -> tuple[list[float], list[float]]:
    edges = [0.0, *(time_s for time_s, _ in result.curve)]
    times, sums = [0.0], [0.0]
    possible = comparison.possible_between(edges)
    for (time_s, value), most in zip(result.curve, possible, strict=True):
        times.append(time_s / 3600)
        sums.append(sums[-1] + (0.0 if value is None else (1 - value) * most / 3600))
    return times, sums


def _minutes(minutes: float) -> str:
    """
    >>> _minutes(6.04), _minutes(0.25)
    ('6 min', '15 s')
    """
    return f"{minutes:.0f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"
