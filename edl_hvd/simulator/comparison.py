"""Compare three systems on one trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from edl_hvd.checkpoint.writing.schedule import (
    auto_interval_s,
    least_loss_interval_s,
    mean_time_between_losses_s,
)
from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.simulator.baselines import StockElastic, restart_from_checkpoints
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.edlrun_model import DriverSimulation
from edl_hvd.simulator.timeline import Hosts, RecordedRun, Result, Timeline, sum_up
from edl_hvd.traces.trace import Trace
from edl_hvd.values import Interval

CURVE_POINTS = 144
# Windows of ten minutes for a day; with shorter windows the curves of a picture overlap.
_AUTO = Interval(0, "auto")
_FACTORS = tuple(2.0 ** (power / 2) for power in range(-8, 9))
# Of Daly's estimate, a sixteenth up to sixteen times of it: the intervals that are tried first.
_HALVINGS = 5
# Then those between the best and its neighbours, each time half as far away.


@dataclass(frozen=True)
class SimulationPlan:
    """Parameters of a simulation.

    Attributes:
        trace: Trace of the hosts.
        costs: Time that each thing takes.
        min_np: Fewest hosts of a world, under this project.
        checkpoint_every: Interval of this project's checkpoints: seconds, or "auto", by the rule that jobs follow.
        stock_checkpoint_every: Interval of the other systems' checkpoints: seconds, or "auto", the best one found.
        poll_s: Seconds between two polls of the host source.
        notice_s: Seconds between a preemption notice and the end of a host, for this project; 0 for no notices.
        elastic_timeout_s: Seconds below the minimum after which this project's run ends; another follows.

    Raises:
        UsageError: The trace is empty, it has too few hosts, or an interval is not a time.
    """

    trace: Trace
    costs: Costs = field(default_factory=Costs)
    min_np: int = 1
    checkpoint_every: Interval = _AUTO
    stock_checkpoint_every: Interval = _AUTO
    poll_s: float = 1.0
    notice_s: float = 0.0
    elastic_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.trace.host_seconds:
            raise UsageError(
                "the trace holds no host for any time, so nothing can be simulated; expected a later 'end'"
            )
        if self.min_np > self.trace.most_hosts:
            most = self.trace.most_hosts
            raise UsageError(f"--min-np is {self.min_np}, more than the {most} hosts that are ever there at once")
        if not self.poll_s:
            raise UsageError("--poll is 0 s; expected a time, more than 0")
        for every in (self.checkpoint_every, self.stock_checkpoint_every):
            if every.unit not in ("seconds", "auto"):
                raise UsageError(f"{every.count:g} {every.unit} between checkpoints: expected a time, or 'auto'")


@dataclass(frozen=True)
class Comparison:
    """Results of a simulation.

    Attributes:
        plan: Parameters of the simulation.
        results: Account of each system: "restart", "horovod", "edl_hvd".
        every_s: Seconds between two checkpoints, for each system; with this project's "auto" those of the end.
        runs: Number of times that this project's job was started.
    """

    plan: SimulationPlan
    results: dict[str, Result]
    every_s: dict[str, float]
    runs: int

    def possible_between(self, edges_s: list[float]) -> list[float]:
        """Host-seconds from each of these moments to the next."""
        hosts = Hosts(self.plan.trace)
        return [hosts.seconds(from_s, until_s) for from_s, until_s in pairwise(edges_s)]


def compare(plan: SimulationPlan, tell: Callable[[str, float], None] = lambda system, done: None) -> Comparison:
    """Run the trace under each system.

    Args:
        plan: Parameters of the simulation.
        tell: Function that is given the name of a system and how much of its run is done, from 0 to 1.
    """
    trace, costs = plan.trace, plan.costs
    rules = Rules(plan.min_np, plan.min_np, trace.most_hosts, elastic_timeout_s=plan.elastic_timeout_s)
    # Times of traces are whole minutes or seconds: with polls at whole seconds no change would wait for one.
    first_poll_s = plan.poll_s / 2

    def restart(timeline: Timeline) -> None:
        restart_from_checkpoints(trace, costs, timeline)

    def stock(timeline: Timeline) -> None:
        StockElastic(trace, costs, timeline, plan.poll_s, first_poll_s, lambda done: tell("horovod", done)).run()

    changes = [change.time_s for change in trace.changes[1:] if change.removed or change.added]
    collapses = [time_s for time_s, count in trace.counts if not count]
    timelines = {
        "restart": _best_run(plan, restart, changes),
        "horovod": _best_run(plan, stock, collapses),
        "edl_hvd": _own_timeline(plan),
    }
    simulation = DriverSimulation(
        trace, costs, rules, timelines["edl_hvd"], plan.poll_s, first_poll_s, plan.notice_s,
        tell=lambda done: tell("edl_hvd", done),
    )  # fmt: skip
    simulation.run()
    results = {system: sum_up(timeline, trace, CURVE_POINTS) for system, timeline in timelines.items()}
    every_s = {system: timeline.every_s for system, timeline in timelines.items()}
    return Comparison(plan, results, every_s, simulation.runs)


def _own_timeline(plan: SimulationPlan) -> Timeline:
    costs = plan.costs
    until_safe_s = costs.copy_s + costs.write_s
    if not plan.checkpoint_every.is_auto:
        return Timeline(plan.checkpoint_every.count, costs.copy_s, until_safe_s)

    def interval_s(trained_s: float, losses: int) -> float:
        return max(auto_interval_s(costs.copy_s, mean_time_between_losses_s(trained_s, losses)), until_safe_s)

    return Timeline(interval_s(0.0, 0), costs.copy_s, until_safe_s, interval_s)


def _best_run(plan: SimulationPlan, run: Callable[[Timeline], None], moments_s: list[float]) -> Timeline:
    """The timeline of another system, with the interval given, or with the one that makes the most of this trace.

    Args:
        plan: Parameters of the simulation.
        run: Function that runs the system.
        moments_s: Moments at which the system needs a checkpoint.
    """
    cost_s = plan.costs.checkpoint_s
    every = plan.stock_checkpoint_every
    if not every.is_auto:
        timeline = Timeline(every.count, cost_s, cost_s)
        run(timeline)
        return timeline
    between_s = plan.trace.end_s / max(1, len(set(moments_s)))
    least_s = max(cost_s, 1.0)
    first_s = max(least_loss_interval_s(cost_s, between_s), least_s)
    # Worlds come and go alike with any interval, but for the time that reading a first checkpoint takes.
    record = RecordedRun(first_s, cost_s, cost_s)
    run(record)
    useful = {every_s: record.useful_with(every_s) for factor in _FACTORS if (every_s := factor * first_s) >= least_s}
    step = _FACTORS[1] / _FACTORS[0]
    for _ in range(_HALVINGS):
        best_s, step = max(useful, key=lambda every_s: useful[every_s]), math.sqrt(step)
        for every_s in (best_s / step, best_s * step):
            if every_s >= least_s:
                useful[every_s] = record.useful_with(every_s)
    timeline = Timeline(max(useful, key=lambda every_s: useful[every_s]), cost_s, cost_s)
    run(timeline)
    return timeline
