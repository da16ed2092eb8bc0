"""Ranked shares: the planner of this package itself, ``edl_hvd.planning.plan``.

Known: it is told the rest of each job's epochs, as Optimus with its oracle is. Blind: it is told nothing of them, and
what is left of the formula is Pollux's own objective, climbed instead of searched.
"""

from __future__ import annotations

from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import JobAsk, PlanRules, Room
from edl_hvd.simulator.cluster.jobs import SimulatedJob
from edl_hvd.simulator.cluster.policies.elastic import as_holds, gpu_numbers, reach
from edl_hvd.simulator.cluster.view import Allocation, ClusterView, JobShape, as_it_chooses
from edl_hvd.simulator.cluster.workload import SubmittedJob

UNDAMPED = PlanRules(settle=0.0, gain=0.0)
"""Without rest after a change, and without a threshold: the cost of a change alone keeps shares."""


class RankedShares:
    """The planner.

    Args:
        is_known: Whether it is told the rest of each job's work.
        rules: How it shares.
        name: Name of this variant.
    """

    def __init__(self, is_known: bool = True, rules: PlanRules = UNDAMPED, name: str = "ranked") -> None:
        self.name = name
        self.is_known = is_known
        self.rules = rules

    def prepare(self, job: SubmittedJob) -> JobShape:
        return as_it_chooses(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        rooms = [Room(f"h{number:03d}", view.host_slots) for number in range(view.hosts)]
        asks = [self._ask(job, view) for job in view.jobs]
        answer = plan(rooms, [], asks, self.rules, view.now_s)
        return {share.job: {int(one.host[1:]): one.slots for one in share.hosts} for share in answer.shares}

    def _ask(self, job: SimulatedJob, view: ClusterView) -> JobAsk:
        most = reach(job, view)
        # Over the whole cluster, because the fair share may be more than what it may have yet.
        curve = job.curve(gpu_numbers(min(view.shapes[job.name].most, view.slots), view.host_slots), view.host_slots)
        return JobAsk(
            job.name,
            least=1,
            most=most,
            curves=() if curve is None else (curve,),
            left=job.left if self.is_known else None,
            asked_s=job.submitted.time_s,
            changed_s=job.changed_s,
            holds=as_holds(view.holds.get(job.name, {})),
            change_s=job.cost.change_s,
            start_s=job.cost.start_s,
            seen=job.largest_seen,
        )
