"""What happens to a student's window, and what is to be done about it: one frozen value for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edl_hvd.distill.place import Place

# --- what happens ---


@dataclass(frozen=True)
class Read:
    """A micro-batch was read; it takes this much memory until it is consumed.

    Attributes:
        place: Place of the micro-batch.
        size_bytes: Bytes of its inputs and of its answer.
        is_answered: Whether its answer is known from an earlier pass.
        checks: Checks of its inputs; the answer of an earlier pass at this place is taken over only with equal ones.
    """

    place: Place
    size_bytes: int
    is_answered: bool = False
    checks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TeacherReady:
    """A teacher is ready; ``process`` tells it from the one that was there before a restart."""

    teacher: str
    process: str


@dataclass(frozen=True)
class Left:
    """A teacher is gone; ``kindly`` if it said that it would go, so that its tasks are not to blame."""

    teacher: str
    kindly: bool = False


@dataclass(frozen=True)
class Wanted:
    """A teacher asks for a task."""

    teacher: str


@dataclass(frozen=True)
class Answered:
    """A teacher has answered a task.

    Attributes:
        teacher: Name of the teacher.
        number: Number of the task.
        answer_bytes: Bytes of the answer.
    """

    teacher: str
    number: int
    answer_bytes: int = 0


@dataclass(frozen=True)
class Declined:
    """A teacher fails on a task, or its answer is none."""

    teacher: str
    number: int
    why: str


@dataclass(frozen=True)
class Asked:
    """The consumer asks for the oldest micro-batch, and has to wait."""


@dataclass(frozen=True)
class Consumed:
    """The consumer has taken the oldest micro-batch, whose answer is there.

    Attributes:
        answer_bytes: Bytes of its answer.
        is_asked: Whether it has asked for this one, if not before then at this moment.
    """

    answer_bytes: int = 0
    is_asked: bool = True


@dataclass(frozen=True)
class Passed:
    """Time has passed."""


@dataclass(frozen=True)
class Closed:
    """The pass is over. What was answered, or is at a teacher, is kept for the next one, unless there is none.

    Attributes:
        is_final: Whether nothing is kept.
    """

    is_final: bool = False


WindowEvent: TypeAlias = Read | TeacherReady | Left | Wanted | Answered | Declined | Asked | Consumed | Passed | Closed


# --- what is to be done ---


@dataclass(frozen=True)
class GiveTask:
    """Send a task to a teacher that has asked for one; ``tasks`` more wait, and ``lead`` answers lie ready."""

    teacher: str
    number: int
    is_alone: bool
    tasks: int
    lead: int


@dataclass(frozen=True)
class GiveNothing:
    """Tell a teacher that has asked that there is no task for it."""

    teacher: str


@dataclass(frozen=True)
class Invite:
    """Tell a teacher that a task waits."""

    teacher: str


@dataclass(frozen=True)
class Withdraw:
    """Tell a teacher that a task's answer is needed no more."""

    teacher: str
    number: int


@dataclass(frozen=True)
class Accept:
    """The answer just heard counts."""

    number: int


@dataclass(frozen=True)
class Drop:
    """Forget the answer to a task that is not in the window any more."""

    number: int


@dataclass(frozen=True)
class Poisoned:
    """Teachers are lost with this task, one after the other; it ends the pass."""

    number: int
    reasons: tuple[str, ...]


Action: TypeAlias = GiveTask | GiveNothing | Invite | Withdraw | Accept | Drop | Poisoned
