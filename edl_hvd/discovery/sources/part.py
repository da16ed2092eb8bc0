"""One part of a union: asked beside the others, stood in for by its last good answer while it fails."""

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
# Every source gives up by itself before; a file on a network that is gone does not, and must not hold up the others.

_Result = Answer | Exception


class Part:
    """A source and its last good answer.

    Args:
        name: As it stands in the text of the combination.
        stale_s: How long after a question its answer may stand in for a newer one.
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
        """Put the question, unless the one before is still open."""
        if not self._running:
            self._running, self._asked_s = True, self._clock.monotonic_s()
            # A daemon: a source that hangs must not keep the program from ending.
            threading.Thread(target=self._ask, name=f"edl_hvd {self.name}", daemon=True).start()

    def _ask(self) -> None:
        try:
            result: _Result = self.source.answer()
        except Exception as error:  # raised again where the answer is awaited
            result = error
        self._results.put(result)

    def answer(self) -> Answer:
        """What the source says, or its last good answer. Blocks until ``PART_S`` after the question.

        Raises:
            DiscoveryError: There is no answer, nor one young enough to stand in.
        """
        try:
            result = self._results.get(timeout=max(0.0, self._asked_s + PART_S - self._clock.monotonic_s()))
        except queue.Empty:
            waited_s = self._clock.monotonic_s() - self._asked_s
            return self._stand_in(f"it has not answered for {waited_s:.0f} s")
        self._running = False
        hosts = None if isinstance(result, Exception) else result.hosts
        self._empty_answers = empty_in_a_row(self._empty_answers, hosts)
        if isinstance(result, DiscoveryError | UsageError):
            return self._stand_in(str(result))
        if isinstance(result, Exception):
            raise result
        if not result.hosts and self._good and self._good.hosts and not is_believed(self._empty_answers):
            good = self._stand_in("it says that it has no hosts; that counts when it says so again")
            return replace(good, notices=result.notices, left_out=result.left_out)
        self._good, self._good_s = result, self._asked_s
        return result

    def _stand_in(self, reason: str) -> Answer:
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
                pass  # of another version; UsageError, of a name that is none, is a ValueError
        self.source.recall(inner, now_s)
