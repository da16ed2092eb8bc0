"""How much faster a job is on more GPUs: laws for jobs of which only duration and GPUs were recorded.

A law gives the speed on a number of GPUs, by that on one. Power laws are n^p. The others are measured: those of
Pollux's applications, with the batch that is best on each number of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edl_hvd.errors import UsageError
from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.profiles import Application, StepTime

SpeedLaw = Callable[[int], float]
"""Speed on a number of GPUs, by that on one GPU."""

_PROFILED_GPUS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_PROFILED_HOST_GPUS = 4
_BATCHES = 50
# Global batches that are tried, in steps of equal ratio.


def power_law(exponent: float) -> SpeedLaw:
    """The speed n^p on n GPUs.

    >>> power_law(0.5)(16)
    4.0

    Args:
        exponent: p, 0 to 1.
    """
    return lambda gpus: float(gpus**exponent)


def useful_gpus(most: int, host_slots: int) -> list[int]:
    """Numbers of GPUs that a curve names: powers of two on one host, then whole hosts, in wider steps above 8 hosts.

    >>> useful_gpus(40, host_slots=8), useful_gpus(6, host_slots=8)
    ([1, 2, 4, 8, 16, 24, 32, 40], [1, 2, 4, 6])

    Args:
        most: Most GPUs, which are named, too.
        host_slots: GPUs of a host.
    """
    found = {1 << power for power in range(host_slots.bit_length()) if 1 << power < host_slots} | {most}
    hosts = 1
    while hosts * host_slots <= most:
        found.add(hosts * host_slots)
        hosts += 1 if hosts < 8 else hosts // 4
    return sorted(size for size in found if size <= most)


def speed_curve(law: SpeedLaw, most: int, host_slots: int) -> Curve:
    """The curve of a law up to a number of GPUs."""
    sizes = useful_gpus(most, host_slots)
    return Curve(tuple(sizes), tuple(law(size) for size in sizes))


def profile_law(application: Application) -> SpeedLaw:
    """The speed of an application's whole training, by its profile.

    GPUs lie on hosts with 4 each, as they did where the profile was measured. Between the numbers of GPUs that are
    looked at, the speed is on the line between them. Beyond 64 GPUs it goes on by the power law of the last doubling,
    where that is a gain.

    Raises:
        UsageError: The profile says nothing of one GPU.
    """
    times = {gpus: time_s for gpus in _PROFILED_GPUS if (time_s := _training_s(application, gpus)) is not None}
    if 1 not in times:
        raise UsageError(f"the profile of {application.name} says nothing of one GPU; expected its steps there")
    curve = Curve(tuple(times), tuple(times[1] / time_s for time_s in times.values()))
    last = curve.sizes[-1]
    growth = max(0.0, math.log2(curve.at(last) / curve.at(last // 2))) if last > 1 else 0.0
    return lambda gpus: curve.at(gpus) * max(1.0, gpus / last) ** growth


def _training_s(application: Application, gpus: int) -> float | None:
    """Seconds of a whole training, each epoch with its best batch; ``None`` where the profile says nothing."""
    steps = _steps(application, gpus)
    if not steps:
        return None
    total_s = 0.0
    for epoch in range(application.epochs):
        best = 0.0
        for batch, step_s in steps:
            noise, scale = application.gradients(batch, epoch), batch / application.base_batch
            best = max(best, (noise.variance + noise.square) / (noise.variance / scale + noise.square) / step_s)
        total_s += (application.progress_at[epoch + 1] - application.progress_at[epoch]) / best
    return total_s


def _steps(application: Application, gpus: int) -> list[tuple[int, float]]:
    """Global batches that are usable on a number of GPUs, and the seconds of a step of each."""
    smallest = max(application.base_batch, application.smallest_local_batch * gpus)
    if smallest > application.largest_batch:
        return []
    whole, rest = divmod(gpus, _PROFILED_HOST_GPUS)
    placement = (_PROFILED_HOST_GPUS,) * whole + ((rest,) if rest else ())
    found = {}
    ratio = application.largest_batch / smallest
    for number in range(_BATCHES):
        batch = smallest * ratio ** (number / (_BATCHES - 1))
        passes = math.ceil(batch / gpus / application.largest_local_batch - 1e-8)
        if gpus == 1 and batch > application.base_batch + 1e-8:
            # The noise of a gradient shows only in the difference of two.
            passes = max(2, passes)
        local = min(math.ceil(batch / gpus / passes - 1e-8), application.largest_batch // (gpus * passes))
        time = _step(application, placement, local)
        if time is not None and gpus * local * passes >= application.base_batch:
            found[gpus * local * passes] = time.step_s + time.compute_s * (passes - 1)
    return sorted(found.items())


def _step(application: Application, placement: tuple[int, ...], local_batch: int) -> StepTime | None:
    try:
        return application.step(placement, local_batch)
    except UsageError:
        return None
