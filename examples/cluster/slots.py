"""Slots over time by job and claim, out of a fleet's history, and a picture of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, not a window

from matplotlib import pyplot

from edl_hvd.fleet.replay import FleetDecision
from edl_hvd.fleet.state import total

COLOURS = ("#4c6ef5", "#12b886", "#f76707", "#ae3ec9", "#1098ad", "#e03131")


@dataclass(frozen=True)
class SlotSpan:
    """A number of slots that a job or claim had from one moment to another, in seconds of the fleet's clock."""

    name: str
    begin_s: float
    end_s: float
    slots: int


def slot_spans(decisions: Iterable[FleetDecision]) -> list[SlotSpan]:
    """What every job and claim had, in order of time."""
    spans: list[SlotSpan] = []
    before: dict[str, int] = {}
    before_s = 0.0
    for decision in decisions:
        spans += [
            SlotSpan(name, before_s, decision.at_s, slots)
            for name, slots in before.items()
            if slots and decision.at_s > before_s
        ]
        fleet = decision.fleet
        before = {job.name: total(job.given) for job in fleet.jobs.values()}
        before |= {claim.name: total(claim.granted) for claim in fleet.claims.values()}
        before_s = decision.at_s
    return spans


def draw(spans: list[SlotSpan], path: Path, slots: int) -> None:
    """Write the picture as a PNG file: a band for each job and claim, one above the other."""
    names = list(dict.fromkeys(span.name for span in spans))
    moments = sorted({span.begin_s for span in spans} | {span.end_s for span in spans})
    heights = [
        [next((one.slots for one in spans if one.name == name and one.begin_s <= at < one.end_s), 0) for at in moments]
        for name in names
    ]
    figure, axes = pyplot.subplots(figsize=(11, 4), layout="constrained")
    begin_s = moments[0] if moments else 0.0
    axes.set(xlabel="seconds", ylabel="slots", ylim=(0, slots), yticks=range(slots + 1), title="Slots by job")
    if names:
        colours = [COLOURS[place % len(COLOURS)] for place in range(len(names))]
        axes.stackplot([at - begin_s for at in moments], heights, labels=names, step="post", colors=colours)
        axes.legend(loc="upper center", ncols=len(names), bbox_to_anchor=(0.5, -0.18), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
