"""Optimus (Peng et al., EuroSys 2018) with an oracle, as Pollux's artifact plays it.

GPUs go one by one to the job whose remaining time shrinks most. The oracle knows the steps that are left and the time
of a step on any number of GPUs; jobs have the batch of their users.
"""

from __future__ import annotations

import math

from edl_hvd.errors import UsageError
from edl_hvd.simulator.cluster.jobs import SimulatedJob
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, spread
from edl_hvd.simulator.cluster.workload import SubmittedJob

_ALMOST = 1e-8


class Optimus:
    """The next GPU goes where it saves most time."""

    name = "optimus"

    def prepare(self, job: AskedJob) -> JobShape:
        if not isinstance(job, SubmittedJob):
            raise UsageError(f"policy optimus needs the profile of what job {job.name!r} trains; choose another one")
        most = 1 if job.application.name == "ncf" else job.batch // job.application.smallest_local_batch
        return JobShape(None, job.batch, most)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        left = view.slots
        numbers: dict[str, int] = {}
        gains: dict[str, float] = {}
        jobs = {job.name: job for job in view.jobs if isinstance(job, SimulatedJob)}
        rests = {name: self._steps_left(job) for name, job in jobs.items()}

        def gain(name: str) -> float:
            gpus = numbers[name]
            if gpus + 1 > view.shapes[name].most or left < 1:
                return 0.0
            job = jobs[name]
            return (self._step_s(job, gpus, view) - self._step_s(job, gpus + 1, view)) * rests[name]

        for name in jobs:
            numbers[name] = min(1, left)
            left -= numbers[name]
            gains[name] = gain(name) if numbers[name] else 0.0
        while left > 0 and max(gains.values()) > 0:
            name = max(gains, key=lambda name: gains[name])
            numbers[name] += 1
            # Looked at before the GPU is taken, as in the artifact.
            gains[name] = gain(name)
            left -= 1
        held = {name: allocation for name, allocation in view.holds.items() if name in jobs}
        allocations = {name: one for name, one in held.items() if sum(one.values()) == numbers[name]}
        free = view.free(allocations.values())
        for name in sorted(jobs, key=lambda name: numbers[name]):
            if numbers[name] and name not in allocations:
                allocations[name] = spread(free, numbers[name])
        return allocations

    def _steps_left(self, job: SimulatedJob) -> float:
        app, batch = job.application, job.submitted.batch
        last = app.epochs - 1
        return app.iterations(batch, last) - app.iterations(batch, job.epoch) if last > job.epoch else 1.0

    def _step_s(self, job: SimulatedJob, gpus: int, view: ClusterView) -> float:
        app, batch = job.application, job.submitted.batch
        whole, rest = divmod(gpus, view.host_slots)
        placement = (view.host_slots,) * whole + ((rest,) if rest else ())
        local = math.ceil(batch / gpus - _ALMOST)
        passes = math.ceil(local / app.largest_local_batch - _ALMOST)
        if gpus == 1:
            passes = max(2, passes)
        local = min(math.ceil(local / passes - _ALMOST), int(app.largest_batch / (gpus * passes)))
        time = app.step(placement, local)
        return time.step_s + time.compute_s * (passes - 1)
