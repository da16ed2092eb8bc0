"""What Kueue lets the operator do with the workers of a job; a job without a queue may do all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.kubernetes.snapshot import EXTRA, FLOOR, PodGroup, SeenJob, SeenNode, SeenPod
from edl_hvd.kubernetes.status import Misplacement

_ADMISSION_S = 10.0
# Within which Kueue admits the worker that replaces a lost one, where there is quota for it.


@dataclass(frozen=True)
class Admission:
    """That a worker may be created now, and its pod group; an extra and a job without a queue have none."""

    group: PodGroup | None = None


class QueuedWorkers:
    """The workers of one job in one turn.

    The workers of the minimum are a pod group. A pod counts in it until it has failed, also while it leaves: Kueue
    would delete one more than the group's number. One that has succeeded counts for ever, and its quota is free.

    Args:
        job: The job.
        least: Its minimum.
        workers: All its workers.
        staying: Those that the plan lets stay.
        leaving: Those that the plan takes away.
        now_s: Seconds since the epoch, which make the name of a new group: one that has ended is not used again.
    """

    def __init__(
        self, job: SeenJob, least: int, workers: Sequence[SeenPod], staying: Sequence[SeenPod],
        leaving: Sequence[SeenPod], now_s: float,
    ) -> None:  # fmt: skip
        self._is_queued = bool(job.queue)
        counted = [pod for pod in workers if pod.phase != "Failed" and (pod.is_bound or not pod.is_deleting)]
        present = [pod for pod in counted if pod.group is not None and not pod.is_over]
        newest = max(present, key=lambda pod: (pod.created_s, pod.name), default=None)
        self._group = (newest.group if newest else None) or PodGroup(f"{job.name}-{int(now_s):x}", least)
        self._members = sum(pod.group == self._group for pod in counted)
        self._is_leaving = any(pod.group == self._group and (pod.is_deleting or pod in leaving) for pod in present)
        self._is_whole = not any(pod.tier == FLOOR and pod.gates for pod in staying)

    def admit(self, tier: str) -> Admission | None:
        """Whether a worker of this tier may be created now; ``None`` if it has to wait.

        An extra waits until the minimum is admitted: it would take the quota of that. A worker of the minimum waits
        while its group is full, and another is about to leave it; else it belongs to none, and is admitted by itself.
        """
        if not self._is_queued:
            return Admission()
        if tier == EXTRA:
            return Admission() if self._is_whole else None
        self._is_whole = False
        if self._members < self._group.count:
            self._members += 1
            return Admission(self._group)
        return None if self._is_leaving else Admission()


def useless_extras(job: SeenJob, least: int, alive: Sequence[SeenPod], now_s: float) -> list[SeenPod]:
    """Extras of a queued job that hold, or would take, a part of the quota that its minimum waits for."""
    is_held = any(pod.tier == FLOOR and pod.gates and now_s - pod.created_s >= _ADMISSION_S for pod in alive)
    if not job.queue or not is_held or sum(pod.is_bound for pod in alive) >= least:
        return []
    return [pod for pod in alive if pod.tier == EXTRA]


def misplacement(job: SeenJob, pod: SeenPod, node: SeenNode | None) -> Misplacement | None:
    """The node of a worker that Kueue has admitted for others, and the labels that the node lacks."""
    if not job.queue or job.spec is None or node is None or pod.is_bound or pod.gates:
        return None
    given = sorted(set(pod.placement.selector) - set(job.spec.placement.selector))
    lacking = [f"{name}={value}" for name, value in given if node.labels.get(name) != value]
    return Misplacement(node.name, ",".join(lacking)) if lacking else None
