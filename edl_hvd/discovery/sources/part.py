"""One part of a union: asked beside the others, and replaced by its last good answer while it fails."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.trust import empty_in_a_row, is_believed
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

PART_S = 30.0
# Seconds. Every source gives up earlier; a file on a lost network does not, and must not delay the others.

_Result = Answer | Exception


class RememberedSource:
    """A source and its last good answer.

    Args:
        name: Text of the part in the combination.
        source: Source of the part.
        stale_s: Seconds after a request for which its answer may replace a newer one that fails.
    """

    def __init__(self, name: str, source: Source, stale_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.name = name
        self.source = source
        self._stale_s = stale_s
        self._clock = clock
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._running = False
        self._asked_s = 0.0
        self._good: Answer | None = None
        self._good_s = 0.0
        self._empty_answers = 0

    def start(self) -> None:
        """Start a request, unless one is under way."""
        if not self._running:
            self._running, self._asked_s = True, self._clock.monotonic_s()
            # A daemon: a source that hangs must not keep the program from ending.
            threading.Thread(target=self._ask, name=f"edl_hvd {self.name}", daemon=True).start()

    def _ask(self) -> None:
        try:
            result: _Result = self.source.answer()
        except Exception as error:  # ``answer`` raises it again
            result = error
        self._results.put(result)

    def answer(self) -> Answer:
        """The answer of the source, or its last good one. Blocks until ``PART_S`` after the request.

        Raises:
            DiscoveryError: There is no answer, and none that is new enough to replace it.
        """
        try:
            result = self._results.get(timeout=max(0.0, self._asked_s + PART_S - self._clock.monotonic_s()))
        except queue.Empty:
            waited_s = self._clock.monotonic_s() - self._asked_s
            return self._last_good(f"it has not answered for {waited_s:.0f} s")
        self._running = False
        hosts = None if isinstance(result, Exception) else result.hosts
        self._empty_answers = empty_in_a_row(self._empty_answers, hosts)
        if isinstance(result, DiscoveryError | UsageError):
            return self._last_good(str(result))
        if isinstance(result, Exception):
            raise result
        if not result.hosts and self._good and self._good.hosts and not is_believed(self._empty_answers):
            good = self._last_good("it says that it has no hosts; that counts when it says so again")
            return replace(good, notices=result.notices, left_out=result.left_out)
        self._good, self._good_s = result, self._asked_s
        return result

    def _last_good(self, reason: str) -> Answer:
        age_s = self._clock.monotonic_s() - self._good_s
        if self._good is None:
            raise DiscoveryError(f"{self.name}: {reason}")
        if age_s > self._stale_s:
            too_old = f"its last good answer is {age_s:.0f} s old, more than --stale {self._stale_s:g} allows"
            raise DiscoveryError(f"{self.name}: {reason}" + f"; {too_old}" * bool(self._stale_s))
        words = f"giving the answer of {self.name} of {age_s:.0f} s ago, good for {self._stale_s:g} s: {reason}"
        return replace(self._good.later(age_s), age_s=age_s, warning=words)

    def memory(self, now_s: float) -> object:
        """See ``Source``."""
        good = None if self._good is None else [[entry.host, entry.slots] for entry in self._good.hosts]
        return [good, now_s - self._good_s, self._empty_answers, self.source.memory(now_s)]

    def recall(self, memory: object, now_s: float) -> None:
        """See ``Source``."""
        self._good, self._empty_answers, inner = None, 0, None
        if isinstance(memory, list) and len(memory) == 4:
            good, age_s, empty_answers, inner = memory
            try:
                hosts = None if good is None else tuple(HostSlots(str(host), int(slots)) for host, slots in good)
                answer = None if hosts is None else Answer(hosts)
                self._good, self._good_s, self._empty_answers = answer, now_s - float(age_s), int(empty_answers)
            except (TypeError, ValueError):
                pass  # the memory is of another version; UsageError, of a wrong name, is a ValueError
        self.source.recall(inner, now_s)
