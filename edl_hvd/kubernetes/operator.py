"""The operator: watches the cluster, and does what :func:`~edl_hvd.kubernetes.turn.decide` says, turn after turn.

It keeps nothing but what it writes into the status of the jobs. Of several that run, the one that holds the Lease acts,
and it alone watches: it lists everything once it acts, and so sees what the one before it has written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import EdlHvdError, PlatformError
from edl_hvd.kubernetes.action_runner import ActionCounts, ActionRunner
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.informer import ClusterWatch
from edl_hvd.kubernetes.leadership import RENEW_EVERY_S, Leadership
from edl_hvd.kubernetes.reports import Reports
from edl_hvd.kubernetes.snapshot import LAUNCHER, ClusterSnapshot, SeenJob
from edl_hvd.kubernetes.turn import decide

QUIET_S = 2.0
# Between two turns without news: for what becomes due by time alone, and for what jobs say of their work.
# The Lease wakes this process as often, and a turn takes milliseconds.
_MOST_PLANNER_FAILURES = 3


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
        counts: What it has done.
        requests: Requests to the API server, by verb (also LIST and WATCH) and code; code 0: no answer.
    """

    is_leader: bool
    now_s: float
    jobs: tuple[SeenJob, ...]
    nodes: int
    seen_age_s: float | None
    look_s: float
    decide_s: float
    turns: int
    counts: ActionCounts
    requests: Mapping[tuple[str, int], int]


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
        self._was_leader = False
        self._turn: _Turn | None = None
        self._runner = ActionRunner(api, leadership, self._news, tell, clock)
        self._reports = Reports(clock=clock)

    def view(self) -> OperatorView:
        """How it stands; for other threads."""
        turn = self._turn
        return OperatorView(
            self._leadership.may_act,
            self._clock.wall_s(),
            () if turn is None else turn.seen.jobs,
            0 if turn is None else len(turn.seen.nodes),
            None if turn is None else self._clock.monotonic_s() - turn.seen_s,
            0.0 if turn is None else turn.look_s,
            0.0 if turn is None else turn.decide_s,
            0 if turn is None else turn.number,
            self._runner.counts(),
            self._api.requests,
        )

    def end(self) -> None:
        """Let :meth:`run` return after this turn; for a signal's handler."""
        self._ending.set()
        self._runner.stop()
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
        self._runner.close()
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
                self._runner.report(guest, guest.problem)
        self._runner.run(actions, decided_s, self._watch)
        return True

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


def _within(rest_s: float) -> float:
    """Seconds to wait so that the Lease is renewed in time."""
    return max(0.0, min(RENEW_EVERY_S, rest_s))
