"""Max-min fairness: the next GPU goes to the job with the fewest, as long as it makes use of it."""

from __future__ import annotations

from edl_hvd.simulator.cluster.policies.elastic import goodput_curve, gpu_numbers, put, reach
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_it_chooses


class MaxMin:
    """Equal shares of GPUs, whatever they bring."""

    name = "max-min"

    def prepare(self, job: AskedJob) -> JobShape:
        return as_it_chooses(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        numbers = {job.name: 0 for job in view.jobs}
        steps = {job.name: gpu_numbers(reach(job, view), view.host_slots) for job in view.jobs}
        curves = {job.name: goodput_curve(job, view) for job in view.jobs}
        left = view.slots
        open_jobs = [job.name for job in view.jobs]
        while open_jobs:
            name = min(open_jobs, key=lambda name: numbers[name])
            size = next((size for size in steps[name] if size > numbers[name]), None)
            is_faster = size is not None and curves[name].at(size) > curves[name].at(numbers[name])
            if size is None or not is_faster or size - numbers[name] > left:
                open_jobs.remove(name)
                continue
            left -= size - numbers[name]
            numbers[name] = size
        return put(numbers, view)
