"""Families of jobs: those of one application begin with what earlier ones have measured, as under the fleet.

Under the fleet and the operator users say which jobs are alike.
"""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, Policy


class WithFamilies:
    """A policy, with families.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = f"{policy.name}-families"

    def prepare(self, job: AskedJob) -> JobShape:
        return replace(self._policy.prepare(job), family=job.family)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        return self._policy.decide(view)
