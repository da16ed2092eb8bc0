"""One trace under three systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from edl_hvd.checkpoint.schedule import least_loss_interval_s
from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.interval import Interval
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.timeline import Course, Hosts, Result, sum_up
from edl_hvd.simulator.edlrun_model import Theatre
from edl_hvd.simulator.baselines import StockElastic, restart_from_checkpoints
from edl_hvd.traces.trace import Trace

CURVE_POINTS = 144
# Of a day, windows of ten minutes; with shorter ones the curves of a picture run into each other.
_EVERY = Interval.parse("10min")
# What the example of docs/simulate.md says.


@dataclass(frozen=True)
class Plan:
    """What is to be simulated.

    Attributes:
        trace: When hosts come and go.
        costs: How long things take.
        min_np: Hosts that a world needs, under this project.
        checkpoint_every: Of this project: seconds, or "auto".
        stock_checkpoint_every: Of the others.
        poll_s: Time between two questions to the host source.
        notice_s: How long before it goes this project knows that a host will go.
        elastic_timeout_s: This project's run ends when there was no world for so long; another follows.

    Raises:
        UsageError: The trace holds nothing, too few hosts, or an interval is not one of time.
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
    """What came of it.

    Attributes:
        plan: Of what.
        results: By the system: "restart", "horovod", "edl_hvd".
        every_s: The time between two checkpoints, by the system.
        runs: How often this project's job was started.
    """

    plan: Plan
    results: dict[str, Result]
    every_s: dict[str, float]
    runs: int

    def possible_between(self, edges_s: list[float]) -> list[float]:
        """Host-seconds that were there from each of these moments to the next."""
        hosts = Hosts(self.plan.trace)
        return [hosts.seconds(from_s, until_s) for from_s, until_s in pairwise(edges_s)]


def compare(plan: Plan) -> Comparison:
    """Play the trace three times."""
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
    courses = {
        "restart": Course(every_s["restart"], costs.checkpoint_s, costs.checkpoint_s),
        "horovod": Course(every_s["horovod"], costs.checkpoint_s, costs.checkpoint_s),
        "edl_hvd": Course(every_s["edl_hvd"], costs.copy_s, costs.copy_s + costs.write_s),
    }
    restart_from_checkpoints(trace, costs, courses["restart"])
    # The times of traces are whole minutes or seconds: a change would never have to wait for a poll.
    first_poll_s = plan.poll_s / 2
    StockElastic(trace, costs, courses["horovod"], plan.poll_s, first_poll_s).play()
    rules = Rules(plan.min_np, plan.min_np, trace.most_hosts, elastic_timeout_s=plan.elastic_timeout_s)
    theatre = Theatre(trace, costs, rules, courses["edl_hvd"], plan.poll_s, first_poll_s, plan.notice_s)
    theatre.play()
    results = {system: sum_up(course, trace, CURVE_POINTS) for system, course in courses.items()}
    return Comparison(plan, results, every_s, theatre.runs)


def _interval_s(every: Interval, cost_s: float, moments_s: list[float], end_s: float) -> float:
    """The user's, or that with which the least is lost, given how often something needs a checkpoint."""
    if not every.is_auto:
        return every.count
    return max(least_loss_interval_s(cost_s, end_s / max(1, len(set(moments_s)))), cost_s, 1.0)
