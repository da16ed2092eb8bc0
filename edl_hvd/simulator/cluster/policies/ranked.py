"""Ranked shares: the planner of this package itself, ``edl_hvd.planning.plan``.

Known: it is told the rest of each job's epochs, as Optimus with its oracle is. Blind: it is told nothing of them, and
what is left of the formula is Pollux's own objective, climbed instead of searched.
"""

from __future__ import annotations

from edl_hvd.hosts import HostSlots
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import JobAsk, PlanRules, Room, Share
from edl_hvd.simulator.cluster.policies.elastic import as_holds, gpu_numbers, reach
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, ViewedJob, as_it_chooses

DEFAULTS = PlanRules()
"""Those of the fleet and of the operator."""

UNDAMPED = PlanRules(settle=0.0, gain=0.0)
"""Without rest after a change, and without a threshold: the cost of a change alone keeps shares."""


class RankedShares:
    """The planner.

    Args:
        is_known: Whether it is told the rest of each job's work.
        rules: How it shares.
        name: Name of this variant.
        doubles: Whether a job may have at most twice as many GPUs as it has trained with, as Pollux explores.
    """

    def __init__(
        self, is_known: bool = True, rules: PlanRules = DEFAULTS, name: str = "ranked", doubles: bool = False
    ) -> None:
        self.name = name
        self.doubles = doubles
        self.is_known = is_known
        self.rules = rules
        self._rooms: dict[tuple[int, int], list[Room]] = {}
        self._given: dict[str, tuple[Allocation, tuple[HostSlots, ...]]] = {}

    def prepare(self, job: AskedJob) -> JobShape:
        return as_it_chooses(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        if (size := (view.hosts, view.host_slots)) not in self._rooms:
            self._rooms[size] = [Room(f"h{number:03d}", view.host_slots) for number in range(view.hosts)]
        asks = [self._ask(job, view) for job in view.jobs]
        answer = plan(self._rooms[size], [], asks, self.rules, view.now_s)
        self._given = {share.job: self._allocation(share) for share in answer.shares}
        return {name: allocation for name, (allocation, _) in self._given.items()}

    def _allocation(self, share: Share) -> tuple[Allocation, tuple[HostSlots, ...]]:
        """A share as an allocation; that of before where nothing has changed."""
        before = self._given.get(share.job)
        if before is not None and before[1] == share.hosts:
            return before
        return {int(one.host[1:]): one.slots for one in share.hosts}, share.hosts

    def _holds(self, job: ViewedJob, view: ClusterView) -> tuple[HostSlots, ...]:
        allocation, given = view.holds.get(job.name, {}), self._given.get(job.name)
        return given[1] if given is not None and given[0] is allocation else as_holds(allocation)

    def _ask(self, job: ViewedJob, view: ClusterView) -> JobAsk:
        most = min(reach(job, view), max(2 * job.largest_seen, 1)) if self.doubles else reach(job, view)
        # Over the whole cluster, because the fair share may be more than what it may have yet.
        curve = job.curve(gpu_numbers(min(view.shapes[job.name].most, view.slots), view.host_slots), view.host_slots)
        return JobAsk(
            job.name,
            least=job.least,
            most=most,
            curves=() if curve is None else (curve,),
            left=job.left if self.is_known else None,
            asked_s=job.submitted.time_s,
            changed_s=job.changed_s,
            holds=self._holds(job, view),
            change_s=job.cost.change_s,
            start_s=job.cost.start_s,
            seen=job.largest_seen,
        )
