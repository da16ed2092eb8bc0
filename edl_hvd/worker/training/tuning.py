"""Chooses the batch of ``WorkerBatch("auto")`` from what steps took and how noisy their gradients were.

Every ``EVERY_STEPS`` steps, between a commit and the next step, the ranks tell each other how long their steps took;
rank 0 fits the model of throughput to all that was measured so far, and tells which batch it chose. The choice is part
of the next commit. Who loses the world before that goes back to the batch before, with all others.

A batch is tried only where it is at most twice the largest one that was measured: nobody knows how it goes on beyond.
What other jobs of the family have measured counts as measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.events import BatchChosen, Event
from edl_hvd.rescale.curve import goodput_by_size
from edl_hvd.rescale.goodput import BatchPlan, best, efficiency, expected
from edl_hvd.rescale.learning import Learning
from edl_hvd.rescale.policy import BatchPolicy, WorkerBatch
from edl_hvd.rescale.throughput import fit
from edl_hvd.settings import family_timings
from edl_hvd.timings import SHARED_TIMINGS, Timing, pooled, with_timing
from edl_hvd.work_report import WorkReport
from edl_hvd.worker.training.process_group import ProcessGroup

EVERY_STEPS = 50  # the median of this many step times is good to some percent; two small collectives are lost in them
_LEAST_GAIN = 1.05  # of goodput: less is within the error of the model, and each change starts the loader anew
_LARGEST_GROWTH = 2


class StepTimer:
    """How long this worker's steps take, from one to the next. The first after a pause says nothing."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._steps_s: list[float] = []

    def pause(self) -> None:
        """What happens until the next step belongs to none: a new loader, a validation."""
        self._since_s = None

    def step(self) -> None:
        """A step is through, and the next one begins."""
        now_s = self._clock.monotonic_s()
        if self._since_s is not None:
            self._steps_s.append(now_s - self._since_s)
        self._since_s = now_s

    def forget(self) -> None:
        """The steps to come are of another kind."""
        self._since_s, self._steps_s = None, []

    def take_ns(self) -> int:
        """The median of the steps since the last call, 0 if there were none; forgets them."""
        found_ns = round(statistics.median(self._steps_s) * 1e9) if self._steps_s else 0
        self._steps_s = []
        return found_ns


def work_report(policy: BatchPolicy, learning: Learning, group: ProcessGroup) -> WorkReport:
    """What rank 0 tells the driver of the work; the numbers of samples left come with each heartbeat."""
    grows = isinstance(policy, WorkerBatch)
    report = WorkReport(policy.global_batch(group.size), policy.micro_batch, grows)
    noise = learning.noise.samples
    known = _known(learning.timings)
    if group.rank or not is_auto(policy) or noise is None or not known:
        return report
    slots_of_host = -(-group.size // group.hosts)
    curve = goodput_by_size(known, policy, noise, slots_of_host)
    worth = efficiency(noise, policy.base_samples, report.global_batch)
    return replace(
        report, sample_worth=worth, sizes=tuple(curve), goodput=tuple(curve.values()),
        timings=learning.timings[-SHARED_TIMINGS:],
    )  # fmt: skip


def _known(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    """What this job has measured, and what others of its family had when it was started."""
    return pooled((*family_timings(), *timings), len(timings) + SHARED_TIMINGS)


def place(sampler: Any, learning: Learning, step: int, size: int) -> None:
    """Deal the batch that was chosen last in a world of ``size``; nothing is measured of it yet. At every join.

    Raises:
        UsageError: The order of the samples suits one size of micro-batch alone.
    """
    policy = sampler.policy
    if is_auto(policy):
        sampler.order.check(replace(policy, micro_batch=None))  # an order of one size of micro-batch does not suit
        wanted = learning.worker_batch or policy.least
        learning.worker_batch = min(max(wanted, policy.least), policy.max or wanted)  # a script may change its bounds
        learning.chosen_at = step
        sampler.policy = policy.with_batch(learning.worker_batch, size)


def is_auto(policy: Any) -> TypeGuard[WorkerBatch]:
    """Whether the batch is chosen while the job runs."""
    return isinstance(policy, WorkerBatch) and policy.size == "auto"


def is_due(learning: Learning, step: int) -> bool:
    """Whether the ranks are to choose at this commit; the same on all of them."""
    return step - learning.chosen_at >= EVERY_STEPS


def choose(
    policy: WorkerBatch,
    learning: Learning,
    step: int,
    timer: StepTimer,
    announce: Callable[[Event], None],
    group: ProcessGroup,
) -> WorkerBatch | None:
    """The policy with another batch, or ``None`` if the present one stays. Collective; blocks.

    Args:
        policy: With the present batch.
        learning: Gets what was measured.
        step: The present one.
        timer: This rank's.
        announce: Writes an event; called on rank 0.
        group: Workers of the present world.
    """
    size, collectives = group.size, group.collectives
    steps_ns = [row[0] for row in collectives.gather_integers([timer.take_ns()])]
    learning.chosen_at = step
    if 0 in steps_ns:  # epochs of one step
        return None
    before = learning.timings
    present = BatchPlan(policy.micro_batch or policy.worker_batch, -(-policy.worker_batch // (policy.micro_batch or 1)))
    timing = Timing(
        size, present.micro_batch, present.accumulation_steps, sum(steps_ns) / size / 1e9, hosts=group.hosts
    )
    learning.timings = with_timing(before, timing)
    batch = policy.worker_batch
    if group.rank == 0:
        batch = _best(policy, learning, group, present)
        announce(_event(policy, learning, step, timing, before, batch))
    batch = collectives.gather_integers([batch])[0][0]
    if batch == policy.worker_batch:
        return None
    learning.worker_batch = batch
    timer.forget()
    return policy.with_batch(batch, size)


def _best(policy: WorkerBatch, learning: Learning, group: ProcessGroup, present: BatchPlan) -> int:
    noise = learning.noise.samples
    if noise is None:
        return policy.worker_batch
    known = _known(learning.timings)
    model = fit(known)
    tried = max(timing.micro_batch * timing.accumulation_steps for timing in known)
    most = min(policy.max or tried, max(_LARGEST_GROWTH * tried, policy.least))
    largest = policy.largest_micro_batch
    if len({timing.micro_batch for timing in known}) == 1 and most > policy.worker_batch:
        return most  # one size of micro-batch does not tell the time per sample from the time per micro-batch
    found = best(model, noise, policy.base_samples, group.size, (policy.least, most), largest, group.hosts)
    now = expected(model, noise, policy.base_samples, group.size, present, group.hosts)
    return found.plan.worker_batch if found.goodput > _LEAST_GAIN * now.goodput else policy.worker_batch


def _event(
    policy: WorkerBatch, learning: Learning, step: int, timing: Timing, before: tuple[Timing, ...], batch: int
) -> BatchChosen:
    noise = learning.noise.samples
    samples = policy.global_batch(timing.size)
    predicted = fit(before).step_s(*timing.plan) if before else None
    return BatchChosen(
        step=step,
        size=timing.size,
        worker_batch=policy.worker_batch,
        micro_batch=timing.micro_batch,
        samples_per_s=samples / timing.step_s,
        predicted_samples_per_s=None if predicted is None else samples / predicted,
        noise_samples=None if noise is None or noise == float("inf") else noise,
        efficiency=None if noise is None else efficiency(noise, policy.base_samples, samples),
        next_worker_batch=batch,
    )
