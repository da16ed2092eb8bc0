"""AFS-L (Hwang et al., NSDI 2021): who of two jobs gets the next GPU, by their lengths and by what it brings them.

Of two jobs, the one that would end first with what both have now comes first, except where the other's throughput gains
more from the GPU than the first one's would gain, in proportion. Knows the rest of each job's work.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.policies.elastic import goodput_curve, gpu_numbers, put, reach
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_it_chooses


@dataclass
class _Candidate:
    """One job on its way up."""

    name: str
    left: float
    curve: Curve
    sizes: list[int]
    gpus: int = 0

    @property
    def next_gpus(self) -> int | None:
        return next((size for size in self.sizes if size > self.gpus), None)


class ElasticShareByLength:
    """AFS-L, in steps of whole hosts above one host."""

    name = "afs-l"

    def prepare(self, job: AskedJob) -> JobShape:
        return as_it_chooses(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        candidates = [
            _Candidate(
                job.name, job.left, goodput_curve(job, view), gpu_numbers(reach(job, view), view.host_slots)
            )
            for job in view.jobs
        ]  # fmt: skip
        left = view.slots
        # Each gets one, the shortest first, as long as there are any.
        candidates.sort(key=lambda one: (one.left / one.curve.at(1), one.name))
        for one in candidates[:left]:
            one.gpus = 1
        left -= min(left, len(candidates))
        open_jobs = [one for one in candidates if one.gpus]
        while left > 0 and open_jobs:
            best = open_jobs[0]
            for other in open_jobs[1:]:
                if self._is_before(other, best):
                    best = other
            size = best.next_gpus
            if size is None or size - best.gpus > left or best.curve.at(size) <= best.curve.at(best.gpus):
                open_jobs.remove(best)
                continue
            left -= size - best.gpus
            best.gpus = size
        return put({one.name: one.gpus for one in candidates}, view)

    def _is_before(self, first: _Candidate, second: _Candidate) -> bool:
        """Whether the next GPUs bring more when the first job has them."""
        short, long = first, second
        if first.left / first.curve.at(first.gpus) >= second.left / second.curve.at(second.gpus):
            short, long = second, first
        more_short, more_long = short.next_gpus, long.next_gpus
        if more_short is None or more_long is None:
            return (more_short is not None) == (short is first)
        gain_short = (short.curve.at(more_short) - short.curve.at(short.gpus)) / (more_short - short.gpus)
        gain_long = (long.curve.at(more_long) - long.curve.at(long.gpus)) / (more_long - long.gpus)
        is_long_better = gain_long / long.curve.at(more_long) > gain_short / short.curve.at(short.gpus)
        return is_long_better == (long is first)
