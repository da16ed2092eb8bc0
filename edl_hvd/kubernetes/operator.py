"""The operator: watches the cluster, and does what :func:`~edl_hvd.kubernetes.turn.decide` says, turn after turn.

It keeps nothing but what it writes into the status of the jobs. Of several that run, the one that holds the Lease acts,
and it alone watches: it lists everything once it acts, and so sees what the one before it has written.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError, PlatformError
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.informer import ClusterWatch
from edl_hvd.kubernetes.leadership import RENEW_EVERY_S, Leadership
from edl_hvd.kubernetes.pods import token_manifest
from edl_hvd.kubernetes.reports import Reports
from edl_hvd.kubernetes.snapshot import (
    GROUP,
    LAUNCHER,
    RESIZED_NOTE,
    VERSION,
    WHY_NOTE,
    ClusterSnapshot,
    SeenGuest,
    SeenJob,
)
from edl_hvd.kubernetes.status import events_of, refusal_event, resize_event, time_text
from edl_hvd.kubernetes.turn import Action, CreatePod, DeletePod, ResizeGuest, WriteStatus, decide

QUIET_S = 2.0
# Between two turns without news: for what becomes due by time alone, and for what jobs say of their work.
# The Lease wakes this process as often, and a turn takes milliseconds.
_JOBS = f"/apis/{GROUP}/{VERSION}"
_MOST_PLANNER_FAILURES = 3
_JOBS_AT_ONCE = 8
# What is done about one job is done in order, one request after the other, but for pods that are deleted together.
_DELETIONS_AT_ONCE = 8
# Of all jobs: in threads of their own, as those of the jobs wait for them.
DELAY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_DONE: Mapping[type, str] = {CreatePod: "pod created", DeletePod: "pod deleted", WriteStatus: "status written",
                              ResizeGuest: "MPIJob resized"}  # fmt: skip


@dataclass(frozen=True)
class OperatorView:
    """How an operator stands.

    Attributes:
        is_leader: Whether it acts.
        now_s: Seconds since the epoch.
        jobs: Jobs as it saw them last; empty before it has acted.
        nodes: Nodes that it saw last.
        seen_age_s: Seconds since the last turn began; ``None`` before the first.
        look_s: Seconds that it took to gather what is known for it.
        decide_s: Seconds that the last plan took, with what follows from it.
        turns: Turns that it finished.
        done: Number of pods created and deleted and of statuses written, by what was done.
        requests: Requests to the API server, by verb (also LIST and WATCH) and code; code 0: no answer.
        delays: Deletions of pods, by the first of ``DELAY_BOUNDS_S`` within which the API server had taken them after
            the decision; infinity for the others.
        delays_sum_s: Seconds of all these delays.
    """

    is_leader: bool
    now_s: float
    jobs: tuple[SeenJob, ...]
    nodes: int
    seen_age_s: float | None
    look_s: float
    decide_s: float
    turns: int
    done: Mapping[str, int]
    requests: Mapping[tuple[str, int], int]
    delays: Mapping[float, int] = field(default_factory=dict)
    delays_sum_s: float = 0.0


@dataclass(frozen=True)
class _Turn:
    """What is kept of a turn, for people to see."""

    seen: ClusterSnapshot
    seen_s: float
    look_s: float
    decide_s: float
    number: int


class Operator:
    """One operator.

    Args:
        api: The API server.
        leadership: Decides whether this operator acts.
        tell: Told what people want to know.
        every_s: Fewest seconds between two turns; more where a turn takes more than a quarter of them.
        clock: For times of conditions and claims.
        with_mpijobs: Whether MPIJobs that ask for it are resized as well.
    """

    def __init__(
        self, api: ApiServer, leadership: Leadership, tell: Callable[[str], None], every_s: float = 0.5,
        clock: Clock = SYSTEM_CLOCK, with_mpijobs: bool = False,
    ) -> None:  # fmt: skip
        self._api, self._leadership, self._tell, self._every_s, self._clock = api, leadership, tell, every_s, clock
        self._with_mpijobs = with_mpijobs
        self._ending, self._news = threading.Event(), threading.Event()
        self._watch: ClusterWatch | None = None
        self._looked_s, self._acted_s = float("-inf"), float("-inf")
        self._said = ""
        self._reported: dict[str, str] = {}
        self._was_leader = False
        self._turn: _Turn | None = None
        self._counting = threading.Lock()
        self._done: Counter[str] = Counter()
        self._delays: Counter[float] = Counter()
        self._delays_sum_s = 0.0
        self._threads = ThreadPoolExecutor(_JOBS_AT_ONCE, thread_name_prefix="edl_hvd job")
        self._deletions = ThreadPoolExecutor(_DELETIONS_AT_ONCE, thread_name_prefix="edl_hvd deletion")
        self._reports = Reports(clock=clock)

    def view(self) -> OperatorView:
        """How it stands; for other threads."""
        turn = self._turn
        with self._counting:
            done, delays, delays_sum_s = dict(self._done), dict(self._delays), self._delays_sum_s
        return OperatorView(
            self._leadership.may_act,
            self._clock.wall_s(),
            () if turn is None else turn.seen.jobs,
            0 if turn is None else len(turn.seen.nodes),
            None if turn is None else self._clock.monotonic_s() - turn.seen_s,
            0.0 if turn is None else turn.look_s,
            0.0 if turn is None else turn.decide_s,
            0 if turn is None else turn.number,
            done,
            self._api.requests,
            delays,
            delays_sum_s,
        )

    def end(self) -> None:
        """Let :meth:`run` return after this turn; for a signal's handler."""
        self._ending.set()
        self._news.set()  # that is what it waits for between two turns

    def run(self) -> None:
        """Watch and act until :meth:`end`. What goes wrong is said once, and tried again.

        Raises:
            PlatformError: No plan could be made three times in a row; another process may do better.
        """
        failures = 0
        while not self._ending.is_set():
            try:
                self._lead()
                if not self._was_leader or (self._is_due() and self.act()):
                    self._said, failures = "", 0
            except EdlHvdError as error:
                if str(error) != self._said:
                    self._tell(f"{error}; trying again")
                self._said = str(error)
                self._ending.wait(min(self._every_s, RENEW_EVERY_S))
            except Exception as error:  # a fault in the plan: what runs goes on
                failures += 1
                self._tell(f"no plan could be made: {type(error).__name__}: {error}")
                if failures >= _MOST_PLANNER_FAILURES:
                    raise PlatformError(f"no plan could be made {failures} times in a row: {error}") from error
                self._ending.wait(min(self._every_s, RENEW_EVERY_S))
            self._wait()
        self._forget()
        self._threads.shutdown()
        self._deletions.shutdown()
        self._reports.close()
        self._leadership.release()

    def _lead(self) -> None:
        if not self._leadership.may_act:
            self._forget()  # another operator may act: what it writes is to be seen before this one acts again
        self._leadership.renew()
        if self._leadership.may_act != self._was_leader:
            self._was_leader = self._leadership.may_act
            self._tell("acts for this cluster" if self._was_leader else "does not act: another operator does")

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _is_due(self) -> bool:
        now_s = self._clock.monotonic_s()
        return now_s >= self._next_s() and (self._news.is_set() or now_s - self._looked_s >= QUIET_S)

    def _next_s(self) -> float:
        """When the next turn may begin. A turn of a large cluster is half a second of a processor."""
        took_s = 0.0 if self._turn is None else self._turn.look_s + self._turn.decide_s
        return self._acted_s + max(self._every_s, 4 * took_s)

    def _wait(self) -> None:
        """Until a turn or the Lease is due."""
        if self._ending.is_set():
            return  # a turn that has begun since has cleared the news of it
        if not self._was_leader:
            self._ending.wait(min(self._every_s, RENEW_EVERY_S))
            return
        began_s = self._clock.monotonic_s()
        if self._news.wait(_within(self._looked_s + QUIET_S - began_s)):
            # A burst of changes is one turn.
            now_s = self._clock.monotonic_s()
            self._ending.wait(_within(min(self._next_s(), began_s + RENEW_EVERY_S) - now_s))

    def act(self) -> bool:
        """One turn: take what is known of the whole cluster, decide, and do it.

        Returns:
            Whether it was made: not before all kinds of objects are listed, at first and after a watch has failed.

        Raises:
            PlatformError: The API server is away, or refuses to show what the turn needs.
        """
        self._looked_s = self._clock.monotonic_s()
        self._news.clear()
        if self._watch is None:
            self._watch = ClusterWatch(self._api, self._news, self._with_mpijobs)
        seen = self.look(self._watch)
        if seen is None:
            return False
        self._acted_s = self._clock.monotonic_s()
        actions = decide(seen, self._clock.wall_s())
        decided_s = self._clock.monotonic_s()
        number = 1 if self._turn is None else self._turn.number + 1
        self._turn = _Turn(seen, self._acted_s, self._acted_s - self._looked_s, decided_s - self._acted_s, number)
        for guest in seen.guests:
            if guest.problem:
                self._report(guest, guest.problem)
        by_job: dict[str, list[Action]] = {}
        for action in actions:
            by_job.setdefault(action.job.uid, []).append(action)
        watch = self._watch
        list(self._threads.map(lambda of_one: self._do_all(of_one, decided_s, watch), by_job.values()))
        return True

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
                self._report(actions[0].job, str(problem))
            if stopped.is_set():
                break
        for event in events:
            try:
                self._create(f"/api/v1/namespaces/{actions[0].job.namespace}/events", event)
            except PlatformError as error:
                self._report(actions[0].job, str(error))

    def _do_one(self, action: Action, decided_s: float, watch: ClusterWatch, events: list[dict[str, Any]]) -> bool:
        """Do it, if this operator still acts; whether what comes after it may be done as well. Its events are appended.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        try:
            self._leadership.renew()  # there may be thousands
        except PlatformError:
            return False  # the next turn does not begin without it, and says why
        if not self._leadership.may_act or self._ending.is_set():
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
        self._news.set()  # what follows from it is for the next turn

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

    def _report(self, job: SeenJob | SeenGuest, text: str) -> None:
        """Say what the API server refuses about a job, in an event of it; the other jobs go on."""
        event = refusal_event(job, text, self._clock.wall_s())
        if self._reported.get(job.uid) == text:
            return
        self._reported[job.uid] = text
        self._tell(f"{job.key}: {text}")
        with suppress(EdlHvdError):  # it was said above
            self._create(f"/api/v1/namespaces/{job.namespace}/events", event)

    def look(self, watch: ClusterWatch) -> ClusterSnapshot | None:
        """The cluster as far as its watch has told; ``None``: not all kinds are listed yet.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        known = watch.known()
        if known is None:
            return None
        launchers = {
            pod.job: pod.address
            for pod in known.pods if pod.job and pod.role == LAUNCHER and pod.phase == "Running" and pod.address
        }  # fmt: skip
        priorities = {one.name: one.value for one in known.priorities}
        reports = self._reports.of(launchers)
        return ClusterSnapshot(known.jobs, known.nodes, known.pods, priorities, reports, known.guests)

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


def _within(rest_s: float) -> float:
    """Seconds to wait so that the Lease is renewed in time."""
    return max(0.0, min(RENEW_EVERY_S, rest_s))
