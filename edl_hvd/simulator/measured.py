"""Read costs from the event log of a real run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.simulator.costs import Costs

_RULES = Rules(1, 1, 1)


@dataclass(frozen=True)
class MeasuredCost:
    """One cost: its name, and the median of the ``times`` durations in the log."""

    name: str
    seconds: float
    times: int
    source: str


def measure(events: Iterable[Mapping[str, Any]]) -> list[MeasuredCost]:
    """Read the costs that an event log holds; it does not hold all of them.

    ========== =========================== =======================================================================
    cost       events                      what is read
    ========== =========================== =======================================================================
    resize_s   ``resized``                 ``downtime_s`` if the cause is "change"
    recover_s  ``resized``                 the same if it is "failure"
    follow_s   ``job_started``,            from a newcomer's first to the agreed change that lets it in
               ``world_formed``,
               ``resized``
    step_s     ``commit``                  time between two commits of one world, per step
    write_s    ``checkpoint``              ``duration_s``
    restore_s  ``restore``                 ``duration_s``
    start_s    ``worker_lost``,            time from one to the other for the same worker, less the second for which
               ``job_started``             the driver waits
    ========== =========================== =======================================================================
    """
    reader = _EventReader()
    for event in events:
        reader.read(event)
    return [
        MeasuredCost(name, median(took_s), len(took_s), source) for (name, source), took_s in reader.seconds.items()
    ]


class _EventReader:
    """Durations found in the events so far, by cost and source."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._commit: Mapping[str, Any] | None = None
        self._lost: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._members: list[str] = []

    def read(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "commit":
                self._read_commit(event)
            case "checkpoint":
                self._note("write_s", "checkpoint", event["duration_s"])
            case "restore":
                self._note("restore_s", "restore", event["duration_s"])
            case "worker_lost":
                self._lost[event["worker"]] = event["time"]
            case "job_started":
                self._read_start(event["worker"], event["time"])
            case "world_formed":
                self._members = event["members"]
            case "resized":
                self._read_resize(event)

    def _note(self, name: str, source: str, took_s: float) -> None:
        self.seconds.setdefault((name, source), []).append(took_s)

    def _read_commit(self, event: Mapping[str, Any]) -> None:
        before, self._commit = self._commit, event
        if before is not None and before["generation"] == event["generation"] and event["step"] > before["step"]:
            took_s = (event["time"] - before["time"]) / (event["step"] - before["step"])
            self._note("step_s", "commit", took_s)

    def _read_start(self, worker: str, time_s: float) -> None:
        if worker in self._lost:
            took_s = time_s - self._lost.pop(worker) - _RULES.backoff_s
            if 0 < took_s <= _RULES.start_s:  # a worker that comes later was not started for that loss
                self._note("start_s", "worker_lost, job_started", took_s)
        if self._members:
            self._started[worker] = time_s

    def _read_resize(self, event: Mapping[str, Any]) -> None:
        started_s = [self._started.pop(worker) for worker in self._members if worker in self._started]
        if event["cause"] == "failure":
            self._note("recover_s", "resized", event["downtime_s"])
            return
        self._note("resize_s", "resized", event["downtime_s"])
        if started_s:
            took_s = event["time"] - event["downtime_s"] - max(started_s)
            self._note("follow_s", "job_started, world_formed, resized", max(0.0, took_s))


def with_measured(costs: Costs, measured: Iterable[MeasuredCost]) -> Costs:
    """Replace costs by those that were measured.

    Raises:
        UsageError: Nothing was measured.
    """
    found = {one.name: one.seconds for one in measured}
    if not found:
        raise UsageError(
            "the event log holds no cost: it has neither 'commit' nor 'resized', 'checkpoint' or 'restore'; "
            "expected the log of a run that trained, which EDL_HVD_EVENTS names"
        )
    return replace(costs, **found)
