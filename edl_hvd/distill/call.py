"""One connection to a teacher: how far it has come, and what is said on it next. Knows no other connection."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edl_hvd import proof
from edl_hvd.body_slots import SlotWriter
from edl_hvd.distill import conversation as say
from edl_hvd.distill.conversation import Address, Message, decode, encode
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits

CallStage: TypeAlias = Literal["connecting", "nonce", "proof", "waiting", "teaching", "ready"]
"""What is awaited next; "waiting": the hello that this side is to say."""
_TEACHING_S = 120.0
# A teacher that computes for others answers a hello after that.


class LastingError(Exception):
    """A teacher cannot be used until a person changes something."""


@dataclass(frozen=True)
class Wishes:
    """What a student asks of every teacher.

    Attributes:
        job, student, outputs, exact: See :class:`~edl_hvd.distill.conversation.Hello`.
        fingerprint: Fingerprint that a teacher must have; empty for that of the first teacher.
    """

    job: str
    student: str
    outputs: str
    exact: bool
    fingerprint: str = ""


class Call:
    """A connection to a teacher. One thread; its socket belongs to the caller.

    Args:
        address: Where the teacher was called.
        stream: Connection, which may still be connecting.
        slots: Shared memory for large tasks, where the teacher is on this host.
        now_s: Now.

    Attributes:
        stage: How far it has come.
        deadline_s: When the present stage has taken too long; ``None``: never.
        is_leaving: Whether the teacher has said that it leaves.
        teaching: What it says of itself, once it is ready.
        needs_write: Whether the selector watches for room to write.
    """

    def __init__(self, address: Address, stream: FrameStream, slots: SlotWriter, now_s: float) -> None:
        self.address, self.stream, self._slots = address, stream, slots
        self.stage: CallStage = "connecting"
        self.deadline_s: float | None = now_s + say.PROOF_S
        self.is_leaving = False
        self.needs_write = True
        self.teaching: say.Teaching | None = None
        self._nonce = self._token = ""
        self._hello: say.Hello | None = None
        self._given: dict[int, int] = {}

    @property
    def tasks(self) -> int:
        """Number of tasks that it has not answered."""
        return len(self._given)

    def greet(self, token: str) -> None:
        """Begin, once the connection is there."""
        self._token, self._nonce, self.stage = token, proof.new_nonce(), "nonce"
        self.stream.put(encode(say.Nonce(say.PROTOCOL, self._nonce)))

    def say_hello(self, hello: say.Hello, now_s: float) -> None:
        """Say what will be sent, where the stage is "waiting"."""
        self._hello, self.stage, self.deadline_s = hello, "teaching", now_s + _TEACHING_S
        self.stream.limits = Limits(say.HEADER_BYTES)
        self.stream.put(encode(hello))

    def give(self, give: say.Give, arrays: tuple[Array, ...]) -> None:
        """Send a task."""
        self._given[give.number] = give.samples
        self.stream.put(encode(give, arrays))

    def put(self, message: Message) -> None:
        """Say anything else."""
        self.stream.put(encode(message))

    def hear(self, frame: Frame) -> Message | None:
        """Take what has come.

        Returns:
            What the student has to decide on: ``Teaching``, ``Want``, ``Answer``, ``Cannot``.

        Raises:
            ProtocolError: It is none of what may come now.
            LastingError: The teacher cannot be used.
            EOFError: The teacher is leaving, and was never used.
        """
        match self.stage:
            case "nonce":
                self._take_nonce(decode(frame, say.FIRST))
            case "proof":
                self._take_proof(decode(frame, say.PROOF))
            case "waiting":
                decode(frame, say.vocabulary(say.Leaving))
                raise EOFError("it is leaving")
            case "teaching":
                return self._take_teaching(decode(frame, say.FROM_NEW_TEACHER))
            case "ready":
                return self._take(decode(frame, say.FROM_TEACHER), frame)
        return None

    def _take_nonce(self, message: Message) -> None:
        if isinstance(message, say.Refuse):
            raise LastingError(f"it refused: {say.shorten(message.why)}")
        assert isinstance(message, say.Nonce)
        if message.protocol != say.PROTOCOL or not proof.is_nonce(message.nonce):
            raise ProtocolError(
                f"it speaks protocol {message.protocol}; expected {say.PROTOCOL}: install the same version of edl_hvd"
            )
        self.stream.put(encode(say.Proof(proof.prove(self._token, proof.STUDENT, self._nonce, message.nonce))))
        # Needed once more, for the other's proof.
        self._nonce, self.stage = f"{message.nonce} {self._nonce}", "proof"

    def _take_proof(self, message: Message) -> None:
        if isinstance(message, say.Refuse):
            raise LastingError(f"it refused: {say.shorten(message.why)}")
        assert isinstance(message, say.Proof)
        theirs, ours = self._nonce.split()
        if not proof.is_proof(message.proof, self._token, proof.TEACHER, theirs, ours):
            raise LastingError("it holds another token; give both sides the same EDL_HVD_TEACHERS_TOKEN")
        self.stage, self.deadline_s = "waiting", None

    def _take_teaching(self, message: Message) -> say.Teaching:
        if isinstance(message, say.Refuse):
            raise LastingError(f"it refused: {say.shorten(message.why)}")
        if isinstance(message, say.Leaving):
            raise EOFError("it is leaving")
        assert isinstance(message, say.Teaching)
        assert self._hello is not None
        self.teaching, self.stage, self.deadline_s = message, "ready", None
        self.stream.limits = Limits(say.HEADER_BYTES, say.row_bytes(message.answer) * self._hello.micro_batch)
        if self.stream.connection.family == socket.AF_UNIX:
            self.stream.write_slots(self._slots)
        return message

    def _take(self, message: Message, frame: Frame) -> Message | None:
        if isinstance(message, say.Leaving):
            self.is_leaving = True
            return None
        if isinstance(message, say.Want) and self.is_leaving:
            self.stream.put(encode(say.Nothing()))
            return None
        if isinstance(message, say.Cannot):
            self._take_number(message.number)
        elif isinstance(message, say.Answer):
            assert self.teaching is not None
            say.check_arrays(frame.arrays, self.teaching.answer, self._take_number(message.number))
        return message

    def _take_number(self, number: int) -> int:
        if number not in self._given:
            raise ProtocolError(f"it answered task {number}, which it was not given")
        return self._given.pop(number)


def check_equal(teaching: say.Teaching, first: say.Teaching | None, wishes: Wishes) -> None:
    """Check that answers of a teacher are those of the first one.

    Raises:
        LastingError: They are not.
    """
    wanted = wishes.fingerprint or (first.fingerprint if first else "")
    if wanted and teaching.fingerprint != wanted:
        raise LastingError(
            f"its model has fingerprint {teaching.fingerprint or 'none'}, the answers here come from {wanted}; "
            "serve the same weights everywhere, or start the student anew"
        )
    if first is not None and teaching.answer != first.answer:
        raise LastingError(
            f"it answers {_show(teaching.answer)} per sample, the first teacher {_show(first.answer)}; serve the "
            "same model everywhere"
        )
    if first is not None and wishes.exact and teaching.probe != first.probe:
        raise LastingError(
            "its answer to the same input has other bits than that of the first teacher; with exact=True use equal "
            "devices, versions of torch and numbers of threads"
        )


def _show(types: tuple[ArrayType, ...]) -> str:
    return ", ".join(str(one) for one in types)
