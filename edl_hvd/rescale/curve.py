"""What a job makes of a number of workers: its goodput, from how long its steps took.

The driver of a job keeps what was measured in each world and gives it to the planner of a cluster as a few numbers
(:class:`~edl_hvd.planning.values.Curve`), so that no planner has to know a model. Where the batch is fixed, a sample is
worth the same in every world, and goodput is throughput. Where it is chosen while the job runs, rank 0 makes the curve
(:func:`goodput_by_size`), because it knows the noise of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from edl_hvd.rescale.goodput import best
from edl_hvd.rescale.policy import WorkerBatch
from edl_hvd.rescale.throughput import fit
from edl_hvd.timings import Timing
from edl_hvd.work_report import WorkReport

_GROWTH = 2
# Times as many workers as were ever seen, as under Pollux (twice the most replicas that were profiled): the time to sum
# over more is not known, least of all over more hosts. A job thus grows from 1 to 8 in three changes of about a second;
# in docs/cluster_experiments.md that costs 2 % of the mean completion time.
_MOST_SIZES = 16
_BATCHES = 24  # looked at for each number of workers: the goodput near its best batch is flat


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Numbers of workers for a curve: every one up to four, then powers of two and the middles between them.

    >>> sizes_up_to(20)
    (1, 2, 3, 4, 6, 8, 12, 16, 20)
    """
    found = (
        {1, 2, 3, most} | {2**power for power in range(_MOST_SIZES)} | {3 * 2**power for power in range(_MOST_SIZES)}
    )
    return tuple(sorted(size for size in found if size <= most))


def throughput_by_size(timings: Iterable[Timing], work: WorkReport, size: int, slots_of_host: int) -> dict[int, float]:
    """Samples per second by number of workers, up to twice as many as were measured.

    >>> timings = [Timing(1, 8, 8, 0.8), Timing(2, 8, 4, 0.4)]
    >>> [round(samples) for samples in throughput_by_size(timings, WorkReport(64, 8), 2, 4).values()]
    [80, 160, 213, 320]

    Args:
        timings: What was measured; at least one.
        work: How the batch is divided in the present world.
        size: Workers of the present world.
        slots_of_host: Slots of a host, at least 1.
    """
    known = list(timings)
    model = fit(known)
    found = {}
    for workers in sizes_up_to(_GROWTH * max(timing.size for timing in known)):
        samples = work.global_batch / size * workers if work.grows else float(work.global_batch)
        micro_batch = work.micro_batch or max(1, -(-round(samples) // workers))
        parts = -(-round(samples) // (micro_batch * workers))
        step_s = model.step_s(workers, micro_batch, parts, hosts_of(workers, slots_of_host))
        found[workers] = samples / step_s
    return found


def goodput_by_size(
    timings: Iterable[Timing], policy: WorkerBatch, noise_samples: float, slots_of_host: int
) -> dict[int, float]:
    """Goodput of the best batch by number of workers, up to twice as many as were measured.

    Args:
        timings: What was measured; at least one.
        policy: ``WorkerBatch("auto")``.
        noise_samples: The gradient noise scale, in samples; may be infinite.
        slots_of_host: As of :func:`throughput_by_size`.
    """
    known = list(timings)
    model, most = fit(known), policy.max or policy.worker_batch
    return {
        workers: best(
            model, noise_samples, policy.base_samples, workers, (policy.least, most), policy.largest_micro_batch,
            hosts_of(workers, slots_of_host), _BATCHES,
        ).goodput
        for workers in sizes_up_to(_GROWTH * max(timing.size for timing in known))
    }  # fmt: skip


def hosts_of(workers: int, slots_of_host: int) -> int:
    """Hosts that a number of workers fills, one after the other."""
    return -(-workers // slots_of_host)
