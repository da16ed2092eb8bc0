"""The autoscaler of EDL's controller (PaddlePaddle/cloud, 2018): fulfilment, in a dry run over sums.

A job's fulfilment is its part of the way from its least to its most. In turns, beginning with the least fulfilled, each
job gets one more, while the cluster as a whole stays under 97 % of its slots; above that, the most fulfilled one loses
one. Its two faults are kept: it compares sums over the cluster, not rooms of hosts, and under the threshold it takes
nothing from a rich job for a poor one.
"""

from __future__ import annotations

from edl_hvd.simulator.cluster.policies.elastic import put
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_it_chooses

_MOST_GPUS = 64


def fulfilment_numbers(
    held: dict[str, int], bounds: dict[str, tuple[int, int]], slots: int, used_by_others: int, threshold: float = 0.97
) -> dict[str, int]:
    """The numbers of workers that the dry run ends with.

    >>> fulfilment_numbers({"a": 5, "b": 1}, {"a": (1, 8), "b": (1, 8)}, slots=10, used_by_others=0)
    {'a': 6, 'b': 3}

    Args:
        held: Workers of each job, at least its least.
        bounds: Least and most of each.
        slots: Slots of the cluster.
        used_by_others: Slots of these that something else uses, or asks for.
        threshold: Part of the slots that the controller fills.
    """
    numbers = dict(held)

    def fulfilment(name: str) -> float:
        least, most = bounds[name]
        return (numbers[name] - least) / (most - least) if most > least else 1.0

    has_changed = True
    while has_changed:
        has_changed = False
        order = sorted(numbers, key=lambda name: (fulfilment(name), name))
        for name in order:
            if numbers[name] < bounds[name][1] and sum(numbers.values()) + used_by_others + 1 <= threshold * slots:
                numbers[name] += 1
                has_changed = True
        for name in reversed(order):
            if numbers[name] > bounds[name][0] and sum(numbers.values()) + used_by_others > threshold * slots:
                numbers[name] -= 1
                has_changed = True
    return numbers


class Fulfilment:
    """EDL's controller; a newcomer's least counts as used before it is there."""

    name = "fulfilment"

    def prepare(self, job: AskedJob) -> JobShape:
        return as_it_chooses(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        held = {job.name: max(1, sum(view.holds.get(job.name, {}).values())) for job in view.jobs}
        bounds = {job.name: (1, max(1, min(view.shapes[job.name].most, _MOST_GPUS))) for job in view.jobs}
        numbers = fulfilment_numbers(held, bounds, view.slots, 0)
        given: dict[str, int] = {}
        left = view.slots
        for job in view.jobs:
            given[job.name] = min(numbers[job.name], left)
            left -= given[job.name]
        return put(given, view)
