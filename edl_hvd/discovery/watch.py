"""Asking a source again and again, and what to believe of its answers.

``TrustedHosts`` decides, without thread or clock; ``HostWatch`` asks. The rule: a new host counts at once, because
nobody is harmed by a worker too many being started; a host is gone when answers in a row say so (``trust.py``), because
a healthy worker stopped by mistake costs more than one more poll; a source in trouble changes nothing. What is
believed to have gone and come back several times lately is left out for a while, see ``damping.py``.
"""

from __future__ import annotations

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
# After one good answer a source that fails every other time would be reported every other time.
DISTINCT_PROBLEMS = 20
# Of one series of troubles; who has read twenty has understood.
LATE_S = 30.0
# Every source of ours gives up by itself before; a file on a network that is gone does not.
CLOSE_S = 5.0
# A callback that does not return within this is not waited for.

_VARYING = re.compile(r"[0-9a-f]*[0-9][0-9a-f.-]*", re.IGNORECASE)
# Ages, process numbers and request names differ in every message about one and the same problem.


@dataclass(frozen=True)
class TrustedHosts:
    """What is believed of a source, from all it has said.

    Attributes:
        hosts: The trusted list: known hosts in the order in which they came.
        row: The newest good answers without a failure between them, as many as are believed.
        troubled_since_s: When the present series of troubles began, or ``None``.
        calm: Good answers since the last trouble.
        reported: The problems of this series that were told.
    """

    hosts: tuple[HostSlots, ...] = ()
    row: tuple[tuple[HostSlots, ...], ...] = ()
    troubled_since_s: float | None = None
    calm: int = 0
    reported: frozenset[str] = frozenset()

    def answered(self, answer: tuple[HostSlots, ...], now_s: float) -> tuple[TrustedHosts, str]:
        """What is trusted after a good answer, and what to tell about it (empty: nothing)."""
        row = (*self.row, answer)[-IN_A_ROW:]
        trusted = replace(self, hosts=self._believe(row), row=row, calm=self.calm + 1)
        if trusted.troubled_since_s is None or trusted.calm < RECOVERY_THRESHOLD:
            return trusted, ""
        news = f"the hosts are known again, after {now_s - trusted.troubled_since_s:.0f} s of trouble"
        return replace(trusted, troubled_since_s=None, reported=frozenset()), news

    def failed(self, problem: str, now_s: float) -> tuple[TrustedHosts, str]:
        """What is trusted after a question without a good answer, and what to tell about it (empty: nothing new)."""
        kind = _VARYING.sub("0", problem)
        is_new = kind not in self.reported and len(self.reported) < DISTINCT_PROBLEMS
        since_s = now_s if self.troubled_since_s is None else self.troubled_since_s
        reported = self.reported | {kind} if is_new else self.reported
        trusted = replace(self, row=(), troubled_since_s=since_s, calm=0, reported=reported)
        return trusted, problem if is_new else ""

    def _believe(self, row: tuple[tuple[HostSlots, ...], ...]) -> tuple[HostSlots, ...]:
        """The newest answer's hosts, and of known hosts what the answers in a row leave them.

        >>> a, b = HostSlots("a", 1), HostSlots("b", 2)
        >>> TrustedHosts(hosts=(a, b))._believe(((a, b), (b,))) == (a, b)
        True
        >>> TrustedHosts(hosts=(a, b))._believe(((b,), (b,))) == (b,)
        True
        """
        answers = [{entry.host: entry.slots for entry in answer} for answer in row]
        known, now = {entry.host: entry.slots for entry in self.hosts}, answers[-1]
        if is_believed(len(row)):
            known = {host: min(slots, max(one.get(host, 0) for one in answers)) for host, slots in known.items()}
        believed = {host: max(known.get(host, 0), now.get(host, 0)) for host in {**known, **now}}
        return tuple(HostSlots(host, slots) for host, slots in believed.items() if slots)


class HostWatch:
    """Polls a source in threads of its own and tells what is to be believed.

    The callbacks are called from one thread, one at a time, and have to return soon; no call begins after
    ``close`` has returned.

    Args:
        source: Asked by one thread at a time; it may take as long as it likes. ``close`` closes it.
        changed: Told the trusted list whenever it has changed, first when there are hosts.
        problem: Told a sentence once per distinct problem, and another when the trouble is over.
        notice: Told once of each trusted host that is about to go, if the source knows, and in how many seconds.
        every_s: Time between an answer and the next question.
        late_s: A question that takes longer is told as a problem.
        damping: Leaves out hosts that flap; ``None``: every host that is believed to be there counts.
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
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # An answer, the reason why there is none, or None when the watch ends.
        self._answers: queue.SimpleQueue[Answer | str | None] = queue.SimpleQueue()
        # Daemons: a source that hangs must not keep the program from ending.
        self._asker = threading.Thread(target=self._ask, name="edl_hvd host source", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="edl_hvd host watch", daemon=True)

    def start(self) -> None:
        """Begin to poll, with the first question at once."""
        self._asker.start()
        self._watcher.start()

    @property
    def hosts(self) -> tuple[HostSlots, ...]:
        """The trusted list now; empty before the first good answer."""
        return self._hosts

    def close(self) -> None:
        """Stop polling. Does not wait for a source that hangs; its thread ends when it answers."""
        self._closing.set()
        self._answers.put(None)
        self._questions.put(False)
        self._source.close()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(CLOSE_S)

    def _ask(self) -> None:
        while self._questions.get() and not self._closing.is_set():
            try:
                answer = self._source.answer()
                format_hosts(answer.hosts)  # raises when a host is listed twice
                self._answers.put(answer)
            except EdlHvdError as error:
                self._answers.put(" ".join(str(error).split()))
            except Exception as error:  # a fault in one source is no reason to stop training
                self._answers.put(f"internal error of the host source, please report: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._questions.put(True)
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
        """Those that count; tells why a host does not, once."""
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
        """Once each, of hosts that count: of one that goes before it ever came nobody needs to hear."""
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
