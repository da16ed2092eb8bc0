"""One connection from a student, as a teacher has it: how far it has come, and what may come next."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from edl_hvd import proof
from edl_hvd.distill import conversation as say
from edl_hvd.distill.conversation import Message, decode, encode
from edl_hvd.errors import EdlHvdError, ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Frame, Limits

StudentStage: TypeAlias = Literal["nonce", "proof", "hello", "introduced", "ready", "refused"]
"""What is awaited next; "introduced": the end of the probe."""


class Student:
    """A connection from a student. One thread; its socket belongs to the caller.

    Args:
        number: Number of the connection.
        stream: Connection.
        peer: Address of the student, for people.
        token: Gives the token.

    Attributes:
        stage: How far it has come.
        deadline_s: When the present stage has taken too long; 0: never.
        hello: What the student is going to send, once it has said so.
        wants: Moments at which a task was asked for and none has come.
        fault: Why it was refused; empty if it was not.
        needs_write: Whether the selector watches for room to write.
    """

    def __init__(self, number: int, stream: FrameStream, peer: str, token: Callable[[], str]) -> None:
        self.number, self.stream, self.peer, self._token = number, stream, peer, token
        self.stage: StudentStage = "nonce"
        self.deadline_s = time.monotonic() + say.PROOF_S
        self.hello: say.Hello | None = None
        self.wants: deque[float] = deque()
        self.fault = ""
        self.needs_write = False
        self._nonce = proof.new_nonce()
        self._held: set[int] = set()
        self._unwanted: set[int] = set()
        stream.put(encode(say.Nonce(say.PROTOCOL, self._nonce)))

    @property
    def is_stranger(self) -> bool:
        """Whether it has not proved that it holds the token."""
        return self.stage in ("nonce", "proof", "refused")

    def hear(self, frame: Frame) -> Message | None:
        """Take what has come.

        Returns:
            What the teacher has to act on: ``Look``, ``Hello``, ``Have``, ``Give``, ``Nothing``, ``Forget``.

        Raises:
            ProtocolError: It is none of what may come now.
        """
        match self.stage:
            case "nonce":
                self._take_nonce(decode(frame, say.NONCE))
            case "proof":
                self._take_proof(decode(frame, say.PROOF))
            case "hello":
                return self._take_hello(decode(frame, say.FROM_NEW_STUDENT))
            case "ready":
                return self._take(decode(frame, say.FROM_STUDENT), frame)
            case _:
                raise ProtocolError(f"a message {frame.what[:20]!r} came at a moment when none was expected")
        return None

    def ask(self) -> None:
        """Ask for a task."""
        self.wants.append(time.monotonic())
        self._limit()
        self.stream.put(encode(say.Want()))

    def replied(self) -> float:
        """The student has replied to a question; returns when it was asked."""
        asked_s = self.wants.popleft()
        self._limit()
        return asked_s

    def needs(self, number: object) -> bool:
        """Whether the student needs the answer to a task that was computed; it holds it no more."""
        if number in self._unwanted:
            self._unwanted.remove(number)
            return False
        self._held.discard(number)
        return True

    def refuse(self, why: str) -> None:
        """Say why the connection is not taken; it ends when that is sent."""
        self.fault = say.shorten(why)
        self.stream.put(encode(say.Refuse(self.fault)))
        self.stage, self.deadline_s = "refused", time.monotonic() + say.PROOF_S

    def _take_nonce(self, message: Message) -> None:
        assert isinstance(message, say.Nonce)
        if message.protocol != say.PROTOCOL or not proof.is_nonce(message.nonce):
            raise ProtocolError(f"it speaks protocol {message.protocol}; expected {say.PROTOCOL}")
        self._nonce, self.stage = f"{self._nonce} {message.nonce}", "proof"

    def _take_proof(self, message: Message) -> None:
        if not isinstance(message, say.Proof):
            raise ProtocolError("a student has nothing to refuse")
        ours, theirs = self._nonce.split()
        try:
            token = self._token()
        except EdlHvdError as error:
            self.refuse(f"this teacher cannot read its own token: {error}")
            return
        if not proof.is_proof(message.proof, token, proof.STUDENT, theirs, ours):
            self.refuse("the token is another one; give both sides the same EDL_HVD_TEACHERS_TOKEN")
            return
        self.stream.put(encode(say.Proof(proof.prove(token, proof.TEACHER, ours, theirs))))
        self.stage, self.deadline_s = "hello", 0.0
        self.stream.limits = Limits(say.HEADER_BYTES)

    def _take_hello(self, message: Message) -> Message:
        if isinstance(message, say.Hello):
            if not message.send or not 0 < message.micro_batch <= 1 << 24:
                raise ProtocolError("a hello names no input, or no size of a micro-batch")
            self.hello, self.stage = message, "introduced"
            if self.stream.connection.family == socket.AF_UNIX:
                self.stream.read_slots()
        return message

    def _take(self, message: Message, frame: Frame) -> Message:
        assert self.hello is not None
        if isinstance(message, say.Forget) and message.number in self._held:
            self._held.remove(message.number)
            self._unwanted.add(message.number)
        elif isinstance(message, (say.Give, say.Nothing)) and not self.wants:
            raise ProtocolError("a task came that was not asked for")
        if isinstance(message, say.Give):
            if not 0 < message.samples <= self.hello.micro_batch:
                raise ProtocolError(f"a task of {message.samples} samples came; expected 1 to {self.hello.micro_batch}")
            say.check_arrays(frame.arrays, self.hello.send, message.samples)
            self._held.add(message.number)
        return message

    def _limit(self) -> None:
        """Accept a body only while a task is asked for."""
        assert self.hello is not None
        body_bytes = say.row_bytes(self.hello.send) * self.hello.micro_batch if self.wants else 0
        self.stream.limits = Limits(say.HEADER_BYTES, body_bytes)
