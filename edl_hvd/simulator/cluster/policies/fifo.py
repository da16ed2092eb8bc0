"""First in, first out: each job has the GPUs and the batch of its user, from its start to its end.

Without backfill the first job that does not fit stops all after it; with backfill, smaller ones pass it.
"""

from __future__ import annotations

from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_asked, spread


class FirstInFirstOut:
    """Gangs in the order of their submission.

    Args:
        has_backfill: Whether a job that fits may start before an earlier one that does not.
    """

    def __init__(self, has_backfill: bool = False) -> None:
        self.name = "fifo-backfill" if has_backfill else "fifo"
        self.has_backfill = has_backfill

    def prepare(self, job: AskedJob) -> JobShape:
        return as_asked(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        given = dict(view.holds)
        free = view.free(given.values())
        for job in view.jobs:
            gpus = view.shapes[job.name].most
            if job.name in given:
                continue
            if gpus <= sum(free):
                given[job.name] = spread(free, gpus)
            elif not self.has_backfill:
                break
        return given
