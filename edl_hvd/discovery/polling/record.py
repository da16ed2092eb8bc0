"""What is known about a source, and what may be done with it. Pure: no file, no clock, no process.

All times are seconds of the machine's monotonic clock, which every process on it shares and nobody sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

EMPTY_ANSWERS = 2
# One empty answer is as likely a cloud's hiccup as the end of a fleet; the second, a refresh later, is not.

FAILURE_CHARACTERS = 400
# A few lines of a terminal; some libraries put the whole answer that they could not read into the message.

_NEVER = -math.inf


@dataclass(frozen=True)
class Record:
    """The history of a source, as far as it matters.

    Attributes:
        began_s: When a series of questions without a long gap began.
        asked_s: When the newest question was put.
        answered_s: When the newest question that got a good answer was put.
        failed_s: When the newest question that got none was put.
        failure: Why that failed.
        empty_answers: How many answers in a row had no host.
        answer: The newest good answer, ``host:slots`` lines; empty when there is none to serve.
    """

    began_s: float = _NEVER
    asked_s: float = _NEVER
    answered_s: float = _NEVER
    failed_s: float = _NEVER
    failure: str = ""
    empty_answers: int = 0
    answer: str = ""

    def asked(self, now_s: float, gap_s: float) -> Record:
        """A question is being put now; after a silence of ``gap_s`` it begins a new series."""
        return replace(self, asked_s=now_s, began_s=now_s if now_s - self.asked_s >= gap_s else self.began_s)

    def answered(self, answer: str) -> Record:
        """The question was answered with hosts."""
        return replace(self, answered_s=self.asked_s, answer=answer, empty_answers=0)

    def answered_empty(self) -> Record:
        """The question was answered with no hosts: a doubt at first, then the truth."""
        count = self.empty_answers + 1
        if count >= EMPTY_ANSWERS:
            return replace(self, failed_s=self.asked_s, failure="there are no hosts", empty_answers=count, answer="")
        failure = "the source says that there are no hosts; that counts when it says so again"
        return replace(self, failed_s=self.asked_s, failure=failure, empty_answers=count)

    def failed(self, reason: str) -> Record:
        """The question was not answered, or not well."""
        line = " ".join(reason.split())
        if len(line) > FAILURE_CHARACTERS:
            line = f"{line[:FAILURE_CHARACTERS]} ..."
        return replace(self, failed_s=self.asked_s, failure=line, empty_answers=0)

    def is_fresh(self, since_s: float) -> bool:
        """The answer belongs to a question put at ``since_s`` or later, and nothing failed after it."""
        return bool(self.answer) and self.answered_s >= since_s and self.failed_s < self.answered_s

    def has_failed(self, since_s: float) -> bool:
        """The newest question was put at ``since_s`` or later and got no answer."""
        return self.failed_s >= since_s and self.failed_s >= self.asked_s

    def is_servable(self, now_s: float, stale_s: float) -> bool:
        """The answer is young enough to stand in for a newer one."""
        return bool(self.answer) and now_s - self.answered_s <= stale_s

    def to_text(self, refresh_s: float, boot: str) -> str:
        """First line: until when the answer is fresh, the boot its times belong to, the answer's length."""
        fresh_until_s = self.answered_s + refresh_s if self.is_fresh(_NEVER) else _NEVER
        head = f"{fresh_until_s!r} {boot} {len(self.answer)}"
        numbers = (self.began_s, self.asked_s, self.answered_s, self.failed_s, self.empty_answers)
        return f"{head}\n{' '.join(map(repr, numbers))}\nfailure: {self.failure}\n\n{self.answer}"

    @classmethod
    def from_text(cls, text: str, boot: str) -> Record:
        """The record in ``text``; an empty one when it is damaged or of another boot."""
        head, _, answer = text.partition("\n\n")
        try:
            first, numbers, failure = head.split("\n")
            if first.split()[1:] != [boot, str(len(answer))]:
                return cls()
            began_s, asked_s, answered_s, failed_s, empty_answers = numbers.split()
            return cls(
                began_s=float(began_s),
                asked_s=float(asked_s),
                answered_s=float(answered_s),
                failed_s=float(failed_s),
                failure=failure.removeprefix("failure: "),
                empty_answers=int(empty_answers),
                answer=answer,
            )
        except ValueError:
            return cls()
