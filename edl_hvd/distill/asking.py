"""One question to one teacher: how does it stand? For a command line; without torch, and it blocks."""

from __future__ import annotations

import select
import socket
import time

from edl_hvd import proof
from edl_hvd.distill import conversation as say
from edl_hvd.distill.conversation import Address, Message, Vocabulary, decode, encode
from edl_hvd.errors import PlatformError, ProtocolError
from edl_hvd.frames import FrameStream, Limits


def ask(address: Address, token: str, timeout_s: float = 5.0) -> say.TeacherStatus:
    """How a teacher stands. Blocks for at most ``timeout_s``.

    Raises:
        PlatformError: There is no teacher that can be asked, and why.
    """
    until_s = time.monotonic() + timeout_s
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
            stream = FrameStream(connection, Limits(say.STRANGER_HEADER_BYTES))
            ours = proof.new_nonce()
            nonce = _exchange(stream, say.Nonce(say.PROTOCOL, ours), say.NONCE, until_s)
            assert isinstance(nonce, say.Nonce)
            if nonce.protocol != say.PROTOCOL:
                raise PlatformError(f"it speaks protocol {nonce.protocol}; expected {say.PROTOCOL}")
            mine = proof.prove(token, proof.STUDENT, ours, nonce.nonce)
            theirs = _exchange(stream, say.Proof(mine), say.PROOF, until_s)
            if isinstance(theirs, say.Refuse):
                raise PlatformError(f"it refused: {theirs.why}")
            assert isinstance(theirs, say.Proof)
            if not proof.is_proof(theirs.proof, token, proof.TEACHER, nonce.nonce, ours):
                raise PlatformError("it holds another token")
            stream.limits = Limits(say.HEADER_BYTES)
            status = _exchange(stream, say.Look(), say.TO_LOOKER, until_s)
            if isinstance(status, say.Refuse):
                raise PlatformError(f"it refused: {status.why}")
            assert isinstance(status, say.TeacherStatus)
            return status
    except (OSError, EOFError, ProtocolError) as error:
        raise PlatformError(getattr(error, "strerror", None) or str(error) or "it did not answer in time") from error


def _exchange(stream: FrameStream, message: Message, known: Vocabulary, until_s: float) -> Message:
    """Say something, and hear what comes next."""
    stream.put(encode(message))
    while True:
        is_flushed = stream.flush()
        frame = stream.receive() if is_flushed else None
        if frame is not None:
            return decode(frame, known)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise PlatformError("it did not answer in time")
        select.select([stream.connection], [] if is_flushed else [stream.connection], [], left_s)
