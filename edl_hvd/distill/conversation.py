"""The messages of students and teachers: one frozen value for each thing that one side says to the other.

    both          Nonce, Proof        neither side sends an array before both proofs are right
    student       Hello | Look        what it will send, and wants back | how the teacher stands
    teacher       Teaching | Refuse | TeacherStatus
    student       Have                how many tasks wait, and how many answers lie ready
    teacher       Want                one task; answered by Give or Nothing
    student       Give + arrays | Nothing
    teacher       Answer + arrays | Cannot
    student       Forget              an answer is needed no more
    teacher       Leaving             it finishes what it has, and wants no more

Each field is checked; a message that is not so ends the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frames import Array, ArrayType, Frame
from edl_hvd.json_values import read_fields, show

PROTOCOL = 1
STRANGER_HEADER_BYTES = 4096
HEADER_BYTES = 1 << 16
PROOF_S = 10.0
# A computer that is up and not the right one answers within this, or not at all.


@dataclass(frozen=True, order=True)
class Address:
    """Where a teacher listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Message:
    """Base of all messages. Each is a frozen dataclass of plain fields."""


@dataclass(frozen=True)
class Nonce(Message):
    """The first message of both sides."""

    protocol: int
    nonce: str


@dataclass(frozen=True)
class Proof(Message):
    """That the sender holds the token, see ``edl_hvd/proof.py``."""

    proof: str


@dataclass(frozen=True)
class Hello(Message):
    """What a student is going to send.

    Attributes:
        job: Name of the run, the same for all workers of one job.
        student: Name of the worker, for people.
        send: Types of one sample's arrays, without the dimension of the batch.
        micro_batch: Largest number of samples in a task, at least 1.
        outputs: What to send back, see ``outputs.py``.
        exact: Whether each task is computed by itself, in the shape of a whole micro-batch.
    """

    job: str
    student: str
    send: tuple[ArrayType, ...]
    micro_batch: int
    outputs: str
    exact: bool


@dataclass(frozen=True)
class Look(Message):
    """A question for the status, from a command line."""


@dataclass(frozen=True)
class Teaching(Message):
    """What a teacher says of itself after a hello.

    Attributes:
        process: Name of the teacher's process; another after a restart.
        model: Name of the model, for people.
        fingerprint: Digest of the weights; empty if the model is a callable that names none.
        answer: Types of one sample's answer.
        max_batch: Largest number of samples in one forward pass.
        probe: Digest of the answer to a fixed input in the shape of a micro-batch; empty unless ``exact``.
    """

    process: str
    model: str
    fingerprint: str
    answer: tuple[ArrayType, ...]
    max_batch: int
    probe: str = ""


@dataclass(frozen=True)
class Refuse(Message):
    """Why a connection is not taken; it ends after this."""

    why: str


@dataclass(frozen=True)
class TeacherStatus(Message):
    """How a teacher stands.

    Attributes:
        process, model, fingerprint, max_batch: See :class:`Teaching`.
        students: Number of students connected.
        waiting: Number of tasks that wait there.
        tasks: Number of tasks answered since its start.
        samples: Number of samples answered since its start.
        samples_per_s: Samples answered per second, over about the last ten.
        compute_s: Seconds spent in the model since its start.
        age_s: Seconds since its start.
        last_fault: What went wrong last; empty if nothing did.
        is_leaving: Whether it wants no more.
    """

    process: str
    model: str
    fingerprint: str
    max_batch: int
    students: int
    waiting: int
    tasks: int
    samples: int
    samples_per_s: float
    compute_s: float
    age_s: float
    last_fault: str = ""
    is_leaving: bool = False


@dataclass(frozen=True)
class Have(Message):
    """How many tasks wait at a student, and how many answers lie ready ahead of its consumer."""

    tasks: int
    lead: int


@dataclass(frozen=True)
class Want(Message):
    """A teacher asks for one task."""


@dataclass(frozen=True)
class Give(Message):
    """A task; its arrays follow.

    Attributes:
        number: Number of the task, unique for the student.
        samples: Number of samples.
        is_alone: Whether it must not be computed together with others.
        tasks, lead: See :class:`Have`, after this one.
    """

    number: int
    samples: int
    is_alone: bool
    tasks: int
    lead: int


@dataclass(frozen=True)
class Nothing(Message):
    """There is no task for this teacher now; the student says :class:`Have` when there is."""


@dataclass(frozen=True)
class Answer(Message):
    """The answer to a task; its arrays follow.

    Attributes:
        number: Number of the task.
        waited_s: Seconds that it lay at the teacher.
        compute_s: Seconds in the model, of the whole batch that it was part of.
    """

    number: int
    waited_s: float
    compute_s: float


@dataclass(frozen=True)
class Cannot(Message):
    """A task that the model fails on."""

    number: int
    why: str


@dataclass(frozen=True)
class Forget(Message):
    """The answer to a task is needed no more; no answer follows."""

    number: int


@dataclass(frozen=True)
class Leaving(Message):
    """A teacher finishes what it has and ends."""


MessageT = TypeVar("MessageT", bound=Message)
Vocabulary: TypeAlias = Mapping[str, type[Message]]
"""The messages that may come next, by the word that each has for ``what``."""


def vocabulary(*kinds: type[Message]) -> Vocabulary:
    """A vocabulary of these messages."""
    return {kind.__name__.lower(): kind for kind in kinds}


NONCE = vocabulary(Nonce)
FIRST = vocabulary(Nonce, Refuse)
PROOF = vocabulary(Proof, Refuse)
FROM_NEW_STUDENT = vocabulary(Hello, Look)
FROM_STUDENT = vocabulary(Have, Give, Nothing, Forget)
FROM_NEW_TEACHER = vocabulary(Teaching, Refuse, Leaving)
FROM_TEACHER = vocabulary(Want, Answer, Cannot, Leaving)
TO_LOOKER = vocabulary(TeacherStatus, Refuse)

_LONGEST_TEXT = 1000
# Of a reason; a header has room for it.


def encode(message: Message, arrays: tuple[Array, ...] = ()) -> Frame:
    """The frame of a message."""
    return Frame(type(message).__name__.lower(), _plain(message), arrays)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(one) for name, one in vars(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def decode(frame: Frame, known: Vocabulary) -> Message:
    """The message of a frame.

    Raises:
        ProtocolError: It is none of the vocabulary, or a field has another type.
    """
    kind = known.get(frame.what)
    if kind is None:
        raise ProtocolError(f"a message {show(frame.what)} came; expected {', '.join(known)}")
    if frame.arrays and kind not in (Give, Answer):
        raise ProtocolError(f"a message {frame.what} came with arrays; expected none")
    try:
        return read_fields(kind, frame.fields)
    except (UsageError, RecursionError) as error:
        raise ProtocolError(f"a message {frame.what} was not understood: {str(error)[:_LONGEST_TEXT]}") from error


def shorten(reason: str) -> str:
    """A reason on one line, short enough for a header."""
    return " ".join(reason.split())[:_LONGEST_TEXT]


def check_arrays(arrays: tuple[Array, ...], rows: tuple[ArrayType, ...], samples: int) -> None:
    """Check that arrays are those of ``samples`` samples of the types agreed.

    Raises:
        ProtocolError: They are not.
    """
    expected = tuple(ArrayType(one.name, one.dtype, (samples, *one.shape)) for one in rows)
    if tuple(one.type for one in arrays) != expected:
        found = ", ".join(str(one.type) for one in arrays) or "no array"
        raise ProtocolError(f"{found[:_LONGEST_TEXT]} came; expected {', '.join(str(one) for one in expected)}")


def row_bytes(rows: tuple[ArrayType, ...]) -> int:
    """Bytes of one sample."""
    return sum(one.size_bytes for one in rows)
