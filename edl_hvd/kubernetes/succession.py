"""Which workers of a job leave, and which leave only when others run in their place: a running job keeps its minimum.

A plan may give a job other nodes. Its workers there start once the room is free; until they run, as many old ones stay
as the minimum needs. That must not be for ever: two jobs whose workers wait for each other's room would both wait. So a
worker stays only for successors that start already, or that have room without anyone who stays in this way.
Kueue counts a worker against the quota until it has gone; there nobody stays for successors that do not start yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edl_hvd.kubernetes.snapshot import FLOOR, SeenPod


@dataclass(frozen=True)
class WorkerSplit:
    """The workers of a job beside what a plan gives it.

    Attributes:
        unit: Slots of a worker.
        wanted: Workers by node, by the plan.
        staying: Workers that it lets stay.
        leaving: Workers that it takes away.
        needed: Those of them that run, and without which fewer than the minimum would.
        starting: Number of workers that stay, do not run yet, and wait for nothing.
        is_queued: Whether Kueue admits its workers.
    """

    unit: int
    wanted: Mapping[str, int]
    staying: tuple[SeenPod, ...]
    leaving: tuple[SeenPod, ...]
    needed: tuple[SeenPod, ...]
    starting: int
    is_queued: bool = False

    @property
    def missing(self) -> dict[str, int]:
        """Workers by node that the plan has and that are not there yet."""
        there = [pod.node for pod in (*self.staying, *self.leaving)]
        return {node: more for node, count in self.wanted.items() if (more := count - there.count(node)) > 0}

    @property
    def is_settled(self) -> bool:
        """Whether all workers are where the plan has them, and run."""
        return not (self.leaving or self.missing) and all(pod.phase == "Running" for pod in self.staying)

    def spare(self, least: int) -> list[SeenPod]:
        """The newest extra of those that stay, if the job has its minimum without it."""
        extras = [pod for pod in self.staying if pod.tier != FLOOR]
        return sorted(extras, key=lambda pod: (-pod.created_s, pod.name))[: int(len(self.staying) > least)]


def split_workers(
    unit: int, least: int, alive: Iterable[SeenPod], wanted: Mapping[str, int], is_queued: bool = False
) -> WorkerSplit:
    """The workers of a job that stay, and those that leave.

    Args:
        unit: Slots of a worker.
        least: The job's minimum of workers.
        alive: Its workers that are not being deleted, and have not ended.
        wanted: Workers by node, by the plan.
        is_queued: Whether Kueue admits its workers.
    """
    by_node: dict[str, list[SeenPod]] = {}
    for pod in alive:
        by_node.setdefault(pod.node, []).append(pod)
    staying: list[SeenPod] = []
    leaving: list[SeenPod] = []
    for node, there in sorted(by_node.items()):
        there.sort(key=_first_to_stay)
        staying += there[: wanted.get(node, 0)]
        leaving += there[wanted.get(node, 0) :]
    short = max(0, least - sum(pod.phase == "Running" for pod in staying))
    running = sorted((pod for pod in leaving if pod.phase == "Running"), key=_first_to_stay)
    starting = sum(pod.phase != "Running" and pod.unschedulable_s is None and not pod.gates for pod in staying)
    return WorkerSplit(unit, wanted, tuple(staying), tuple(leaving), tuple(running[:short]), starting, is_queued)


def kept_until_replaced(splits: Sequence[WorkerSplit], coming: Mapping[str, int]) -> frozenset[str]:
    """UIDs of the workers that leave only when others run in their place.

    Args:
        splits: Those of all jobs on one resource, in a fixed order.
        coming: Slots by node that are free, or will be when the pods have gone that leave already.
    """
    left = dict(coming)
    for one in splits:
        for pod in one.leaving:
            if pod not in one.needed:
                left[pod.node] = left.get(pod.node, 0) + one.unit
    for one in splits:
        if not one.needed:
            for node, count in one.missing.items():
                left[node] = left.get(node, 0) - count * one.unit
    kept: set[str] = set()
    for one in splits:
        if one.needed:
            successors = one.starting
            for node, count in one.missing.items() if not one.is_queued else ():
                fitting = min(count, max(0, left.get(node, 0)) // one.unit)
                left[node] = left.get(node, 0) - fitting * one.unit
                successors += fitting
            kept |= {pod.uid for pod in one.needed[:successors]}
    return frozenset(kept)


def _first_to_stay(pod: SeenPod) -> tuple[bool, bool, float, str]:
    """Who runs stays before who waits, the least before extras, the older before the newer."""
    return pod.phase != "Running", pod.tier != FLOOR, pod.created_s, pod.name
