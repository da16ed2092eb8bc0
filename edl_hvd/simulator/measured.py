"""Costs from the event log of a real run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.simulator.costs import Costs

_LONGEST_START_S = Rules(1, 1, 1).start_s
# Whoever comes back later was not started when the other had gone.


@dataclass(frozen=True)
class Measured:
    """One cost: the median of so many times in the log."""

    name: str
    seconds: float
    times: int
    source: str


def measure(events: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """What an event log tells of the costs, which is not all of them.

    ========== ======================= ===========================================================================
    cost       events                  what of them
    ========== ======================= ===========================================================================
    resize_s   ``resized``             ``seconds`` where the cause is "change"
    recover_s  ``resized``             the same where it is "failure"
    step_s     ``commit``              time between two commits of one world, per step
    write_s    ``checkpoint``          ``seconds``
    restore_s  ``restore``             ``seconds``
    start_s    ``worker_lost`` and     time from one to the other, for the same worker, less the second that the
               ``job_started``         driver waits
    ========== ======================= ===========================================================================
    """
    seconds: dict[tuple[str, str], list[float]] = {}

    def note(name: str, source: str, value_s: float) -> None:
        seconds.setdefault((name, source), []).append(value_s)

    last_commit: Mapping[str, Any] | None = None
    lost: dict[str, float] = {}
    for event in events:
        kind = event["event"]
        if kind == "resized":
            note("recover_s" if event["cause"] == "failure" else "resize_s", "resized", event["seconds"])
        elif kind == "checkpoint":
            note("write_s", "checkpoint", event["seconds"])
        elif kind == "restore":
            note("restore_s", "restore", event["seconds"])
        elif kind == "worker_lost":
            lost[event["worker"]] = event["time"]
        elif kind == "job_started" and event["worker"] in lost:
            took_s = event["time"] - lost.pop(event["worker"]) - Rules(1, 1, 1).backoff_s
            if 0 < took_s <= _LONGEST_START_S:
                note("start_s", "worker_lost, job_started", took_s)
        elif kind == "commit":
            if last_commit is not None and last_commit["generation"] == event["generation"]:
                steps = event["step"] - last_commit["step"]
                if steps > 0:
                    note("step_s", "commit", (event["time"] - last_commit["time"]) / steps)
            last_commit = event
    return [Measured(name, median(values), len(values), source) for (name, source), values in seconds.items()]


def with_measured(costs: Costs, measured: Iterable[Measured]) -> Costs:
    """Those that were measured instead of those that stand there.

    Raises:
        UsageError: There are none.
    """
    found = {one.name: one.seconds for one in measured}
    if not found:
        raise UsageError(
            "the event log tells of no cost: it holds neither 'commit' nor 'resized', 'checkpoint' or 'restore'; "
            "expected the log of a run that trained, which EDL_HVD_EVENTS names"
        )
    return replace(costs, **found)
