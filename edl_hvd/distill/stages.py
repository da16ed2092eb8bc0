"""Where the time of a micro-batch goes, from reading to learning; in means. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.stage_times import StageTimes


@dataclass
class _Trip:
    read_s: float
    given_s: float | None = None
    answered_s: float | None = None


class Stages:
    """The stages of the tasks of one pass. Answers that are taken over from an earlier pass do not count."""

    def __init__(self) -> None:
        self._trips: dict[int, _Trip] = {}
        self._sums = dict.fromkeys(("queued_s", "wire_s", "waiting_s", "compute_s", "ready_s"), 0.0)
        self._answers = self._consumed = 0

    def read(self, number: int, now_s: float) -> None:
        """A micro-batch was read."""
        self._trips[number] = _Trip(now_s)

    def given(self, number: int, now_s: float) -> None:
        """It is sent to a teacher."""
        if number in self._trips:
            self._trips[number].given_s = now_s

    def answered(self, number: int, waiting_s: float, compute_s: float, now_s: float) -> None:
        """Its answer has come.

        Args:
            number: Number of the task.
            waiting_s: Time that it lay at the teacher.
            compute_s: Time in the model.
            now_s: Now.
        """
        trip = self._trips.get(number)
        if trip is None or trip.given_s is None:
            return
        trip.answered_s = now_s
        self._answers += 1
        self._sums["queued_s"] += trip.given_s - trip.read_s
        self._sums["waiting_s"] += waiting_s
        self._sums["compute_s"] += compute_s
        self._sums["wire_s"] += max(0.0, now_s - trip.given_s - waiting_s - compute_s)

    def consumed(self, number: int, now_s: float) -> None:
        """The training takes it."""
        trip = self._trips.pop(number, None)
        if trip is not None and trip.answered_s is not None:
            self._consumed += 1
            self._sums["ready_s"] += now_s - trip.answered_s

    @property
    def times(self) -> StageTimes | None:
        """The means so far, without what the pass itself measures; ``None`` before the first answer."""
        if not self._answers:
            return None
        counts = {name: self._consumed if name == "ready_s" else self._answers for name in self._sums}
        return StageTimes(**{name: round(total / max(1, counts[name]), 6) for name, total in self._sums.items()})
