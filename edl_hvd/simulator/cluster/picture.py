"""Draw the GPUs of each job over time, one band per job, for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edl_hvd.errors import UsageError
from edl_hvd.simulator.cluster.play import Played


def draw_slots(results: Sequence[Played], path: str, title: str) -> None:
    """Write the picture as a PNG file: one panel per policy, with the GPUs of each job as a band of its own colour.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # a file, not a window
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a picture needs matplotlib; install it with: pip install 'edl-hvd[report]'") from error
    figure = Figure(figsize=(11, 1 + 2.4 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    end_h = max(result.makespan_s for result in results) / 3600
    for axes, result in zip(panels, results, strict=True):
        names = [job.name for job in result.jobs]
        times = [at.time_s / 3600 for at in result.history] + [result.makespan_s / 3600]
        rows = [[*(at.slots.get(name, 0) for at in result.history), 0] for name in names]
        colours = [colormaps["tab20"](number % 20) for number in range(len(names))]
        axes.stackplot(times, rows, step="post", colors=colours, linewidth=0)
        axes.set_title(f"{result.policy}: {result.average_s / 60:.0f} min in the mean", loc="left", fontsize=10)
        axes.set_ylabel("GPUs")
        axes.set_ylim(0, result.setting.hosts * result.setting.host_slots)
        axes.set_xlim(0, end_h)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("hours")
    try:
        figure.savefig(Path(path), dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"cannot write the picture {path}: {error.strerror}") from error
