"""Carries out at the API server what a turn has decided, and counts it.

Jobs are served side by side. What is decided about one job is done in order, one request after the other, but for pods
that are deleted together.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError, PlatformError
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.informer import ClusterWatch
from edl_hvd.kubernetes.leadership import Leadership
from edl_hvd.kubernetes.planned import ResizeGuest
from edl_hvd.kubernetes.pods import token_manifest
from edl_hvd.kubernetes.snapshot import GROUP, RESIZED_NOTE, VERSION, WHY_NOTE, SeenGuest, SeenJob
from edl_hvd.kubernetes.status import events_of, refusal_event, resize_event, time_text
from edl_hvd.kubernetes.turn import Action, CreatePod, DeletePod, WriteStatus

DELAY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_JOBS = f"/apis/{GROUP}/{VERSION}"
_JOBS_AT_ONCE = 8
_DELETIONS_AT_ONCE = 8
# Of all jobs: in threads of their own, as those of the jobs wait for them.
_DONE: Mapping[type, str] = {CreatePod: "pod created", DeletePod: "pod deleted", WriteStatus: "status written",
                              ResizeGuest: "MPIJob resized"}  # fmt: skip


@dataclass(frozen=True)
class ActionCounts:
    """What an operator has done.

    Attributes:
        done: Number of pods created and deleted and of statuses written, by what was done.
        delays: Deletions of pods, by the first of ``DELAY_BOUNDS_S`` within which the API server had taken them after
            the decision; infinity for the others.
        delays_sum_s: Seconds of all these delays.
    """

    done: Mapping[str, int]
    delays: Mapping[float, int]
    delays_sum_s: float


class ActionRunner:
    """Carries out actions, while this operator holds the Lease.

    Args:
        api: The API server.
        leadership: Decides whether this operator acts; asked before each action.
        news: Event that is set when something was done: what follows from it is for the next turn.
        tell: Function that is told what people want to know. Any thread calls it.
        clock: For times of events, and delays.
    """

    def __init__(
        self, api: ApiServer, leadership: Leadership, news: threading.Event, tell: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._api, self._leadership, self._news, self._tell, self._clock = api, leadership, news, tell, clock
        self._stopping = threading.Event()
        self._reported: dict[str, str] = {}
        self._counting = threading.Lock()
        self._done: Counter[str] = Counter()
        self._delays: Counter[float] = Counter()
        self._delays_sum_s = 0.0
        self._threads = ThreadPoolExecutor(_JOBS_AT_ONCE, thread_name_prefix="edl_hvd job")
        self._deletions = ThreadPoolExecutor(_DELETIONS_AT_ONCE, thread_name_prefix="edl_hvd deletion")

    def counts(self) -> ActionCounts:
        """What was done until now; for other threads."""
        with self._counting:
            return ActionCounts(dict(self._done), dict(self._delays), self._delays_sum_s)

    def stop(self) -> None:
        """Begin no other action; for a signal's handler."""
        self._stopping.set()

    def close(self) -> None:
        """End the threads. Blocks until what has begun is done."""
        self._threads.shutdown()
        self._deletions.shutdown()

    def run(self, actions: Sequence[Action], decided_s: float, watch: ClusterWatch) -> None:
        """Carry out what a turn has decided, as far as the API server lets it. Blocks.

        Args:
            actions: The actions; those of one job in order.
            decided_s: When they were decided, by the clock.
            watch: What is known of the cluster, which is told what was written.
        """
        by_job: dict[str, list[Action]] = {}
        for action in actions:
            by_job.setdefault(action.job.uid, []).append(action)
        list(self._threads.map(lambda of_one: self._do_all(of_one, decided_s, watch), by_job.values()))

    def report(self, job: SeenJob | SeenGuest, text: str) -> None:
        """Say what the API server refuses about a job, in an event of it; the other jobs go on."""
        event = refusal_event(job, text, self._clock.wall_s())
        if self._reported.get(job.uid) == text:
            return
        self._reported[job.uid] = text
        self._tell(f"{job.key}: {text}")
        with suppress(EdlHvdError):  # it was said above
            self._create(f"/api/v1/namespaces/{job.namespace}/events", event)

    def _do_all(self, actions: Sequence[Action], decided_s: float, watch: ClusterWatch) -> None:
        """What is decided about one job, in order, as far as the API server lets it; its events last.

        Pods that it shall lose one after the other are deleted side by side, and waited for.
        """
        events: list[dict[str, Any]] = []
        stopped = threading.Event()

        def do(action: Action) -> PlatformError | None:
            if stopped.is_set():
                return None
            try:
                if not self._do_one(action, decided_s, watch, events):
                    stopped.set()
            except PlatformError as error:
                stopped.set()
                return error
            return None

        for are_deletions, group in groupby(actions, lambda action: isinstance(action, DeletePod)):
            problems = list((self._deletions.map if are_deletions else map)(do, group))
            if problem := next(filter(None, problems), None):
                self.report(actions[0].job, str(problem))
            if stopped.is_set():
                break
        for event in events:
            try:
                self._create(f"/api/v1/namespaces/{actions[0].job.namespace}/events", event)
            except PlatformError as error:
                self.report(actions[0].job, str(error))

    def _do_one(self, action: Action, decided_s: float, watch: ClusterWatch, events: list[dict[str, Any]]) -> bool:
        """Do it, if this operator still acts; whether what comes after it may be done as well. Its events are appended.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        try:
            self._leadership.renew()  # there may be thousands
        except PlatformError:
            return False  # the next turn does not begin without it, and says why
        if not self._leadership.may_act or self._stopping.is_set():
            return False
        try:
            if self._do(action, watch):
                self._count(action, self._clock.monotonic_s() - decided_s)
                events += self._events(action)
        except ObjectExistsError:
            return False  # it was written meanwhile: the watch will tell
        except ObjectMissingError:
            pass
        return True

    def _count(self, action: Action, delay_s: float) -> None:
        with self._counting:
            self._done[_DONE[type(action)]] += 1
            if isinstance(action, DeletePod):
                self._delays[next((bound for bound in DELAY_BOUNDS_S if delay_s <= bound), float("inf"))] += 1
                self._delays_sum_s += delay_s
        self._news.set()

    def _events(self, action: Action) -> list[dict[str, Any]]:
        """The events of an action that was done, which are told as well."""
        now_s = self._clock.wall_s()
        match action:
            case WriteStatus(job, status):
                events = events_of(job, status, now_s)
            case ResizeGuest(guest, replicas, why):
                events = [resize_event(guest, replicas, why, now_s)]
            case _:
                return []
        for event in events:
            self._tell(f"{action.job.key}: {event['reason']}: {event['message']}")
        return events

    def _do(self, action: Action, watch: ClusterWatch) -> bool:
        """Whether it was this that did it."""
        core = f"/api/v1/namespaces/{action.job.namespace}"
        match action:
            case WriteStatus(job, status):
                path = f"{_JOBS}/namespaces/{job.namespace}/trainingjobs/{job.name}/status"
                change = {"metadata": {"resourceVersion": job.resource_version}, "status": dict(status)}
                watch.job_written(self._api.patch(path, change))
            case CreatePod(job, manifest, needs):
                for other in needs:
                    self._create(f"{core}/services", other)
                if needs:
                    self._create(f"{core}/secrets", token_manifest(job, secrets.token_urlsafe()))
                created = self._create(f"{core}/pods", dict(manifest))
                if created is None:
                    return False
                watch.pod_created(created)
            case DeletePod(_, pod, grace_s):
                try:
                    self._api.delete(f"{core}/pods/{pod.name}", pod.uid, grace_s)
                except ObjectMissingError:
                    watch.pod_deleted(pod.uid)  # it has gone before
                    raise
                watch.pod_deleted(pod.uid)
            case ResizeGuest(guest, replicas, why):
                path = f"/apis/{guest.api_version}/namespaces/{guest.namespace}/mpijobs/{guest.name}"
                notes = {RESIZED_NOTE: time_text(self._clock.wall_s()), WHY_NOTE: why}
                change = {
                    "metadata": {"resourceVersion": guest.resource_version, "annotations": notes},
                    "spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}},
                }
                watch.guest_written(self._api.patch(path, change))
        return True

    def _create(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Create an object; ``None``: an earlier operator, or an earlier turn, has done it."""
        with suppress(ObjectExistsError):
            return self._api.create(path, manifest)
        return None
