"""The record of a source, and when its answer may be served. Pure: no file, no clock, no process.

All times are seconds of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edl_hvd.discovery.trust import empty_in_a_row, is_believed

FAILURE_CHARACTERS = 400
# Some lines of a terminal; some libraries put a whole unreadable answer into the message.

_NEVER = -math.inf


@dataclass(frozen=True)
class Record:
    """State of a source between two requests.

    Attributes:
        began_s: Time at which a series of requests without a long gap began.
        asked_s: Time of the newest request.
        answered_s: Time of the newest request with a good answer.
        failed_s: Time of the newest request without one.
        failure: Reason of that failure.
        empty_answers: Number of answers in a row without a host.
        answer: Newest good answer, ``host:slots`` lines; empty if there is none to serve.
        age_s: Seconds by which the oldest part of the answer is older than its request.
        remark: Warnings beside the answer: why a part is old, why a host is left out; empty for none.
        unchanged: Signs of the files on which the newest answer depends, and until when, see ``poll.py``; empty where
            another request is needed to know.
        memory: Memory of the source and the damping, as JSON whose times count back from ``answered_s``.
    """

    began_s: float = _NEVER
    asked_s: float = _NEVER
    answered_s: float = _NEVER
    failed_s: float = _NEVER
    failure: str = ""
    empty_answers: int = 0
    answer: str = ""
    age_s: float = 0.0
    remark: str = ""
    unchanged: str = ""
    memory: str = ""

    def asked(self, now_s: float, gap_s: float) -> Record:
        """Return the record of a request that begins now; after a gap of ``gap_s`` it begins a new series."""
        return replace(
            self, asked_s=now_s, unchanged="", began_s=now_s if now_s - self.asked_s >= gap_s else self.began_s
        )

    def answered(
        self, answer: str, age_s: float = 0.0, remark: str = "", memory: str = "", unchanged: str = ""
    ) -> Record:
        """Return the record after an answer with hosts."""
        return replace(
            self, answered_s=self.asked_s, answer=answer, empty_answers=0,
            age_s=age_s, remark=_one_line(remark), memory=memory, unchanged=unchanged,
        )  # fmt: skip

    def answered_empty(self) -> Record:
        """Return the record after an answer without hosts, which is believed the second time in a row."""
        count = empty_in_a_row(self.empty_answers, ())
        if is_believed(count):
            return replace(self, failed_s=self.asked_s, failure="there are no hosts", empty_answers=count, answer="")
        failure = "the source says that there are no hosts; that counts when it says so again"
        return replace(self, failed_s=self.asked_s, failure=failure, empty_answers=count)

    def failed(self, reason: str) -> Record:
        """Return the record after a request without a good answer."""
        count = empty_in_a_row(self.empty_answers, None)
        return replace(self, failed_s=self.asked_s, failure=_one_line(reason), empty_answers=count)

    def is_fresh(self, since_s: float) -> bool:
        """Whether the answer is of a request at ``since_s`` or later, and no failure came after it."""
        return bool(self.answer) and self.answered_s >= since_s and self.failed_s < self.answered_s

    def has_failed(self, since_s: float) -> bool:
        """Whether the newest request was made at ``since_s`` or later and failed."""
        return self.failed_s >= since_s and self.failed_s >= self.asked_s

    def is_servable(self, now_s: float, stale_s: float) -> bool:
        """Whether the answer is new enough to be served in place of a newer one."""
        return bool(self.answer) and now_s - self.answered_s + self.age_s <= stale_s

    def to_text(self, refresh_s: float, boot: str) -> str:
        """The record as text, whose first two lines ``poll.py`` reads.

        The first has the time until which the answer is fresh, the boot, and the length; the second is ``unchanged``.
        """
        fresh_until_s = self.answered_s + refresh_s if self.is_fresh(_NEVER) else _NEVER
        head = f"{fresh_until_s!r} {boot} {len(self.answer)}"
        numbers = (self.began_s, self.asked_s, self.answered_s, self.failed_s, self.age_s, self.empty_answers)
        words = f"failure: {self.failure}\nremark: {self.remark}\nmemory: {self.memory}"
        return f"{head}\nunchanged: {self.unchanged}\n{' '.join(map(repr, numbers))}\n{words}\n\n{self.answer}"

    @classmethod
    def from_text(cls, text: str, boot: str) -> Record:
        """Read a record from ``text``; an empty one if it is damaged or of another boot."""
        head, _, answer = text.partition("\n\n")
        try:
            first, unchanged, numbers, failure, remark, memory = head.split("\n")
            if first.split()[1:] != [boot, str(len(answer))]:
                return cls()
            began_s, asked_s, answered_s, failed_s, age_s, empty_answers = numbers.split()
            return cls(
                began_s=float(began_s),
                asked_s=float(asked_s),
                answered_s=float(answered_s),
                failed_s=float(failed_s),
                failure=failure.removeprefix("failure: "),
                empty_answers=int(empty_answers),
                answer=answer,
                age_s=float(age_s),
                remark=remark.removeprefix("remark: "),
                unchanged=unchanged.removeprefix("unchanged: "),
                memory=memory.removeprefix("memory: "),
            )
        except ValueError:
            return cls()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= FAILURE_CHARACTERS else f"{line[:FAILURE_CHARACTERS]} ..."
