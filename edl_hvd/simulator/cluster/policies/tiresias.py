"""Tiresias (Gu et al., NSDI 2019), two queues by attained service, as Pollux's artifact plays it.

Jobs have the GPUs and the batch of their users. A job that has used more than 16 GPU-hours goes to the second queue.
"""

from __future__ import annotations

from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_asked, spread

_THRESHOLD_GPU_S = 16 * 3600


class Tiresias:
    """Two queues; the first one that was not served long comes first."""

    name = "tiresias"

    def __init__(self) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])
        self._is_running: dict[str, bool] = {}
        self._executed_s: dict[str, int] = {}
        self._looked_s: dict[str, int] = {}

    def prepare(self, job: AskedJob) -> JobShape:
        return as_asked(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        jobs = {job.name: view.shapes[job.name].most for job in view.jobs}
        now_s = int(view.now_s)
        first, second = self._queues = tuple([name for name in queue if name in jobs] for queue in self._queues)  # type: ignore[assignment]
        for name, gpus in jobs.items():
            if name not in self._is_running:
                self._is_running[name] = False
                first.append(name)
            if self._is_running[name]:
                self._executed_s[name] = self._executed_s.get(name, 0) + now_s - self._looked_s[name]
                if name in first and self._executed_s[name] * gpus >= _THRESHOLD_GPU_S:
                    first.remove(name)
                    second.append(name)
            self._looked_s[name] = now_s
        allocations = {name: held for name, held in view.holds.items() if name in jobs}
        left = view.slots
        order = [*first, *second]
        for name in order:
            self._is_running[name] = jobs[name] <= left
            if self._is_running[name]:
                left -= jobs[name]
            else:
                allocations.pop(name, None)
        free = view.free(allocations.values())
        for name in order:
            if self._is_running[name] and name not in allocations:
                allocations[name] = spread(free, jobs[name])
        return allocations
