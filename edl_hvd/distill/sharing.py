"""Whom a teacher asks for its next task, and which tasks it computes together. Pure.

Between jobs, the one whose tasks have taken the least of the teacher's time is asked first; a job that is new starts
where the others are. Within a job the neediest worker is asked: the one with the fewest answers ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_AHEAD_RATIO = 8.0
# In simulation, a task that waits at a slow teacher stalls its student; one that waits at a fast teacher hides the way.


@dataclass(frozen=True)
class Pupil:
    """A student as a teacher sees it.

    Attributes:
        job: Name of its job.
        micro_batch: Largest number of samples in a task.
        is_alone: Whether each of its tasks is computed by itself, as with ``exact``.
        tasks: Number of tasks that it has, as far as is known.
        lead: Number of answers that lie ready there.
        asked: Number of questions that it has not replied to.
        turn: When it was asked last; counts questions.
    """

    job: str
    micro_batch: int
    is_alone: bool = False
    tasks: int = 0
    lead: int = 0
    asked: int = 0
    turn: int = 0


@dataclass(frozen=True)
class Sharing:
    """What a teacher knows of its students.

    Attributes:
        pupils: Students by name.
        used_s: Time that each present job has had.
        turns: Number of questions so far.
    """

    pupils: Mapping[str, Pupil] = field(default_factory=dict)
    used_s: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0

    @property
    def asked_samples(self) -> int:
        """Number of samples that the questions under way may bring."""
        return sum(pupil.asked * pupil.micro_batch for pupil in self.pupils.values())

    def joined(self, student: str, job: str, micro_batch: int, is_alone: bool = False) -> Sharing:
        """After a student has said hello."""
        least_s = min(self.used_s.values(), default=0.0)
        used_s = {**self.used_s, job: self.used_s.get(job, least_s)}
        return replace(self, pupils={**self.pupils, student: Pupil(job, micro_batch, is_alone)}, used_s=used_s)

    def left(self, student: str) -> Sharing:
        """After a student is gone."""
        pupils = {name: pupil for name, pupil in self.pupils.items() if name != student}
        jobs = {pupil.job for pupil in pupils.values()}
        return replace(self, pupils=pupils, used_s={job: s for job, s in self.used_s.items() if job in jobs})

    def heard(self, student: str, tasks: int, lead: int, is_reply: bool = False) -> Sharing:
        """After a student has said what it has, in reply to a question or by itself."""
        if student not in self.pupils:
            return self
        pupil = self.pupils[student]
        asked = max(0, pupil.asked - 1) if is_reply else pupil.asked
        return replace(self, pupils={**self.pupils, student: replace(pupil, tasks=tasks, lead=lead, asked=asked)})

    def asked(self, student: str) -> Sharing:
        """After a student was asked for a task."""
        if student not in self.pupils:
            return self
        pupil, turns = self.pupils[student], self.turns + 1
        return replace(
            self, pupils={**self.pupils, student: replace(pupil, asked=pupil.asked + 1, turn=turns)}, turns=turns
        )

    def computed(self, job: str, seconds: float) -> Sharing:
        """After a task of a job has taken some time."""
        if job not in self.used_s:
            return self
        return replace(self, used_s={**self.used_s, job: self.used_s[job] + seconds})

    def next_student(self, room: int, is_empty: bool = False, is_ahead: bool = False) -> str | None:
        """The student to ask next; ``None`` if none has a task that fits.

        >>> sharing = Sharing().joined("a", "job", 8).joined("b", "job", 8)
        >>> sharing = sharing.heard("a", tasks=3, lead=5).heard("b", tasks=1, lead=2)
        >>> sharing.next_student(8), sharing.asked("b").next_student(8), sharing.next_student(4)
        ('b', 'a', None)

        Args:
            room: Number of samples that may be asked for.
            is_empty: Whether the teacher has nothing to do, so that any task fits.
            is_ahead: Whether it asks for tasks that it will not compute at once. Otherwise one that is computed by
                itself is asked for when there is no other, or it would wait here while other teachers are free.
        """
        ready = [
            (self.used_s[pupil.job], pupil.lead + pupil.asked, pupil.turn, name)
            for name, pupil in self.pupils.items()
            if pupil.tasks > pupil.asked
            and (
                (pupil.micro_batch <= room and (is_ahead or not pupil.is_alone))
                or (is_empty and not self.asked_samples)
            )
        ]
        return min(ready)[-1] if ready else None


@dataclass(frozen=True)
class Lot:
    """What decides whether a task may be computed together with others.

    Attributes:
        kind: Whatever has to be equal: the types of its arrays, and the outputs.
        samples: Number of samples.
        is_alone: Whether it is computed by itself.
    """

    kind: object
    samples: int
    is_alone: bool


def together(lots: Sequence[Lot], most: int) -> int:
    """The number of tasks, from the first on, that make the next batch; at least 1 of a sequence that is not empty.

    >>> plain, alone = Lot("images", 4, False), Lot("images", 4, True)
    >>> together([plain, plain, plain], 8), together([plain, alone], 8), together([alone, plain], 8)
    (2, 1, 1)

    Args:
        lots: Tasks in the order in which they came.
        most: Largest number of samples; a single task may have more.
    """
    if not lots:
        return 0
    count, samples = 1, lots[0].samples
    while not lots[0].is_alone and count < len(lots):
        lot = lots[count]
        if lot.is_alone or lot.kind != lots[0].kind or samples + lot.samples > most:
            break
        count, samples = count + 1, samples + lot.samples
    return count


def asks_ahead(compute_s: float, round_trip_s: float) -> bool:
    """Whether a teacher asks for its next tasks while it computes.

    Args:
        compute_s: Time of a typical batch.
        round_trip_s: Time from a question to the task's last byte.
    """
    return 0.0 < compute_s < _AHEAD_RATIO * round_trip_s
