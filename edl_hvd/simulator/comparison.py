"""Compare three systems on one trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from edl_hvd.checkpoint.writing.schedule import least_loss_interval_s
from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.simulator.baselines import StockElastic, restart_from_checkpoints
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.edlrun_model import DriverSimulation
from edl_hvd.simulator.timeline import Hosts, Result, Timeline, sum_up
from edl_hvd.traces.trace import Trace
from edl_hvd.values import Interval

CURVE_POINTS = 144
# Windows of ten minutes for a day; with shorter windows the curves of a picture overlap.
_EVERY = Interval.parse("10min")
# As in the example of docs/simulate.md.


@dataclass(frozen=True)
class SimulationPlan:
    """Parameters of a simulation.

    Attributes:
        trace: Trace of the hosts.
        costs: Time that each thing takes.
        min_np: Fewest hosts of a world, under this project.
        checkpoint_every: Interval of this project's checkpoints: seconds, or "auto".
        stock_checkpoint_every: Interval of the other systems' checkpoints.
        poll_s: Seconds between two polls of the host source.
        notice_s: Seconds between a preemption notice and the end of a host, for this project; 0 for no notices.
        elastic_timeout_s: Seconds below the minimum after which this project's run ends; another follows.

    Raises:
        UsageError: The trace is empty, it has too few hosts, or an interval is not a time.
    """

    trace: Trace
    costs: Costs = field(default_factory=Costs)
    min_np: int = 1
    checkpoint_every: Interval = _EVERY
    stock_checkpoint_every: Interval = field(default_factory=lambda: Interval(0, "auto"))
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
        every_s: Seconds between two checkpoints, for each system.
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


def compare(plan: SimulationPlan) -> Comparison:
    """Run the trace under each system."""
    trace, costs = plan.trace, plan.costs
    removals = [change.time_s for change in trace.changes if change.removed]
    changes = [change.time_s for change in trace.changes[1:] if change.removed or change.added]
    collapses = [time_s for time_s, count in trace.counts if not count]
    stock, own = plan.stock_checkpoint_every, plan.checkpoint_every
    every_s = {
        "restart": _interval_s(stock, costs.checkpoint_s, changes, trace.end_s),
        "horovod": _interval_s(stock, costs.checkpoint_s, collapses, trace.end_s),
        "edl_hvd": _interval_s(own, costs.copy_s, removals, trace.end_s),
    }
    timelines = {
        "restart": Timeline(every_s["restart"], costs.checkpoint_s, costs.checkpoint_s),
        "horovod": Timeline(every_s["horovod"], costs.checkpoint_s, costs.checkpoint_s),
        "edl_hvd": Timeline(every_s["edl_hvd"], costs.copy_s, costs.copy_s + costs.write_s),
    }
    restart_from_checkpoints(trace, costs, timelines["restart"])
    # Times of traces are whole minutes or seconds: with polls at whole seconds no change would wait for one.
    first_poll_s = plan.poll_s / 2
    StockElastic(trace, costs, timelines["horovod"], plan.poll_s, first_poll_s).run()
    rules = Rules(plan.min_np, plan.min_np, trace.most_hosts, elastic_timeout_s=plan.elastic_timeout_s)
    simulation = DriverSimulation(trace, costs, rules, timelines["edl_hvd"], plan.poll_s, first_poll_s, plan.notice_s)
    simulation.run()
    results = {system: sum_up(timeline, trace, CURVE_POINTS) for system, timeline in timelines.items()}
    return Comparison(plan, results, every_s, simulation.runs)


def _interval_s(every: Interval, cost_s: float, moments_s: list[float], end_s: float) -> float:
    """The interval given, or the one that loses least where each of these moments needs a checkpoint."""
    if not every.is_auto:
        return every.count
    return max(least_loss_interval_s(cost_s, end_s / max(1, len(set(moments_s)))), cost_s, 1.0)
