"""Poll a source, and decide which hosts to trust.

``TrustedHosts`` decides, without thread or clock; ``HostWatch`` polls. A new host counts at once, because starting a
worker too many does no harm. A host is gone when several answers in a row lack it (``trust.py``), because stopping a
healthy worker costs more than another poll. A source that fails changes nothing. Flapping hosts are left out for a
while (``damping.py``).
"""

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.trust import IN_A_ROW, is_believed
from edl_hvd.errors import EdlHvdError
from edl_hvd.hosts import HostSlots, format_hosts

RECOVERY_THRESHOLD = 2
# Good answers. With one, a source that fails every other time would be reported every other time.
DISTINCT_PROBLEMS = 20
# Problems reported in one series; more say nothing new.
LATE_S = 30.0
# Seconds. Every source of this package gives up earlier; a file on a lost network does not.
CLOSE_S = 5.0
# Seconds to wait for a callback that does not return.

_VARYING = re.compile(r"[0-9a-f]*[0-9][0-9a-f.-]*", re.IGNORECASE)
# Ages, process numbers and request names differ between messages about the same problem.


@dataclass(frozen=True)
class TrustedHosts:
    """Trusted hosts of a source, from all its answers.

    Attributes:
        hosts: Trusted hosts, in the order in which they came.
        row: Newest good answers without a failure between them, at most ``IN_A_ROW``.
        troubled_since_s: Time at which the present series of failures began, or ``None``.
        calm: Number of good answers since the last failure.
        reported: Problems of this series that were reported.
        problem: Newest problem of this series; empty outside of one.
    """

    hosts: tuple[HostSlots, ...] = ()
    row: tuple[tuple[HostSlots, ...], ...] = ()
    troubled_since_s: float | None = None
    calm: int = 0
    reported: frozenset[str] = frozenset()
    problem: str = ""

    def answered(self, answer: tuple[HostSlots, ...], now_s: float) -> tuple[TrustedHosts, str]:
        """Return the trusted hosts after a good answer, and a message about it (empty for none)."""
        row = (*self.row, answer)[-IN_A_ROW:]
        trusted = replace(self, hosts=self._believe(row), row=row, calm=self.calm + 1)
        if trusted.troubled_since_s is None or trusted.calm < RECOVERY_THRESHOLD:
            return trusted, ""
        news = f"the hosts are known again, after {now_s - trusted.troubled_since_s:.0f} s of trouble"
        return replace(trusted, troubled_since_s=None, reported=frozenset(), problem=""), news

    def failed(self, problem: str, now_s: float) -> tuple[TrustedHosts, str]:
        """Return the trusted hosts after a failed poll, and a message about it (empty for nothing new)."""
        kind = _VARYING.sub("0", problem)
        is_new = kind not in self.reported and len(self.reported) < DISTINCT_PROBLEMS
        since_s = now_s if self.troubled_since_s is None else self.troubled_since_s
        reported = self.reported | {kind} if is_new else self.reported
        trusted = replace(self, row=(), troubled_since_s=since_s, calm=0, reported=reported, problem=problem)
        return trusted, problem if is_new else ""

    def _believe(self, row: tuple[tuple[HostSlots, ...], ...]) -> tuple[HostSlots, ...]:
        """The hosts of the newest answer, and known hosts with the slots that the answers in a row leave them.

        >>> a, b = HostSlots("a", 1), HostSlots("b", 2)
        >>> TrustedHosts(hosts=(a, b))._believe(((a, b), (b,))) == (a, b)
        True
        >>> TrustedHosts(hosts=(a, b))._believe(((b,), (b,))) == (b,)
        True
        """
        answers = [{entry.host: entry for entry in answer} for answer in row]
        known, now = {entry.host: entry for entry in self.hosts}, answers[-1]
        if is_believed(len(row)):
            most: dict[str, HostSlots] = {}
            for entry in itertools.chain.from_iterable(row):
                if entry.host not in most or entry.slots > most[entry.host].slots:
                    most[entry.host] = entry
            # The most slots of the answers, and no more than were known.
            known = {
                host: entry if entry.slots <= most[host].slots else most[host]
                for host, entry in known.items() if host in most
            }  # fmt: skip
        # The newest answer's form of a host comes first: it says which devices go with the slots.
        for host, entry in now.items():
            if host not in known or entry.slots >= known[host].slots:
                known[host] = entry
        return tuple(known.values())


@dataclass(frozen=True)
class SourceTrouble:
    """Failure of a source, which leaves the hosts as they are.

    Attributes:
        problem: Newest problem, a sentence.
        for_s: Seconds since the first failure of the series.
    """

    problem: str
    for_s: float


class HostWatch:
    """Polling of a source in threads of its own; callbacks get the trusted hosts.

    The callbacks are called from one thread, one at a time, and have to return soon. No call begins after ``close`` has
    returned.

    Args:
        source: Source to poll, from one thread at a time; it may block. ``close`` closes it.
        changed: Function that gets the trusted hosts whenever they change, first when there are any.
        problem: Function that gets a sentence for each distinct problem, and one when the source has recovered.
        notice: Function that gets each trusted host with a preemption notice, once, and the seconds that remain.
        every_s: Seconds between an answer and the next request.
        late_s: Seconds after which a request without an answer is reported as a problem.
        damping: Damping of flapping hosts; ``None`` for none.
    """

    def __init__(
        self,
        source: Source,
        changed: Callable[[tuple[HostSlots, ...]], None],
        problem: Callable[[str], None],
        notice: Callable[[str, float], None] = lambda host, seconds: None,
        every_s: float = 1.0,
        late_s: float = LATE_S,
        clock: Clock = SYSTEM_CLOCK,
        damping: Damping | None = None,
    ) -> None:
        self._source = source
        self._changed = changed
        self._problem = problem
        self._notice = notice
        self._noticed: frozenset[str] = frozenset()
        self._every_s = every_s
        self._late_s = late_s
        self._clock = clock
        self._trusted = TrustedHosts()
        self._damping = damping
        self._suppressed: frozenset[str] = frozenset()
        self._hosts: tuple[HostSlots, ...] = ()
        self._closing = threading.Event()
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # An answer, the reason why there is none, or None at the end of the watch.
        self._answers: queue.SimpleQueue[Answer | str | None] = queue.SimpleQueue()
        # Daemons: a source that hangs must not keep the program from ending.
        self._asker = threading.Thread(target=self._ask, name="edl_hvd host source", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="edl_hvd host watch", daemon=True)

    def start(self) -> None:
        """Start to poll, with the first request at once."""
        self._asker.start()
        self._watcher.start()

    @property
    def hosts(self) -> tuple[HostSlots, ...]:
        """The trusted list now; empty before the first good answer."""
        return self._hosts

    @property
    def trouble(self) -> SourceTrouble | None:
        """The present series of failures; ``None`` while the source answers. Any thread."""
        trusted = self._trusted
        if trusted.troubled_since_s is None:
            return None
        for_s = max(0.0, self._clock.monotonic_s() - trusted.troubled_since_s)
        return SourceTrouble(trusted.problem, round(for_s, 3))

    def close(self) -> None:
        """Stop polling. Does not wait for a source that hangs; its thread ends when it answers."""
        self._closing.set()
        self._answers.put(None)
        self._requests.put(False)
        self._source.close()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(CLOSE_S)

    def _ask(self) -> None:
        while self._requests.get() and not self._closing.is_set():
            try:
                answer = self._source.answer()
                format_hosts(answer.hosts)  # raises when a host is listed twice
                self._answers.put(answer)
            except EdlHvdError as error:
                self._answers.put(" ".join(str(error).split()))
            except Exception as error:  # a fault of a source must not stop training
                self._answers.put(f"internal error of the host source, please report: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._requests.put(True)
            answer = self._wait_for_answer()
            if answer is None or self._closing.is_set():
                return
            now_s = self._clock.monotonic_s()
            known = self._hosts
            if isinstance(answer, str):
                self._trusted, news = self._trusted.failed(answer, now_s)
            else:
                self._trusted, news = self._trusted.answered(answer.hosts, now_s)
            if news:
                self._problem(news)
            self._hosts = self._damp(self._trusted.hosts, now_s)
            if self._hosts != known:
                self._changed(self._hosts)
            if not isinstance(answer, str):
                self._pass_on(answer.notices)
            self._closing.wait(self._every_s)

    def _damp(self, believed: tuple[HostSlots, ...], now_s: float) -> tuple[HostSlots, ...]:
        """The hosts that count; reports once why another does not."""
        if self._damping is None:
            return believed
        self._damping = self._damping.observed(believed, now_s)
        suppressed = self._damping.left_out(now_s)
        for host, why in suppressed.items():
            if host not in self._suppressed:
                self._problem(f"{host} is left out: {why}")
        self._suppressed = frozenset(suppressed)
        return self._damping.kept(believed)

    def _pass_on(self, notices: Mapping[str, float]) -> None:
        """Report each notice once, for hosts that count."""
        here = {entry.host for entry in self._hosts}
        for host, seconds in notices.items():
            if host in here and host not in self._noticed:
                self._notice(host, seconds)
        self._noticed = frozenset(host for host in notices if host in here or host in self._noticed)

    def _wait_for_answer(self) -> Answer | str | None:
        try:
            return self._answers.get(timeout=self._late_s)
        except queue.Empty:
            reason = (
                f"the host source has not answered for {self._late_s:g} s; the hosts stay as they are until it does"
            )
            self._trusted, news = self._trusted.failed(reason, self._clock.monotonic_s())
            if news:
                self._problem(news)
            return self._answers.get()
