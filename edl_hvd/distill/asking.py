"""One question to one teacher: how does it stand? For a command line; without torch, and it blocks."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
import time
from urllib.parse import urlsplit

from edl_hvd import proof, tls
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.distill import conversation as say
from edl_hvd.distill.conversation import Address, Message, Vocabulary, decode, encode
from edl_hvd.errors import PlatformError, ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Limits
from edl_hvd.http_client import BodyTooLongError, Bounds, exchange
from edl_hvd.open_inference import ModelUrl, read_inputs, reason_of

_METADATA_BYTES = 1 << 20


def ask(
    address: Address, token: str, timeout_s: float = 5.0, context: ssl.SSLContext | None = None
) -> say.TeacherStatus:
    """How a teacher stands. Blocks for at most ``timeout_s``.

    Args:
        address: Address of the teacher.
        token: Token that both prove.
        timeout_s: Seconds for all of it.
        context: How the teacher is verified by TLS; ``None`` for a connection without it.

    Raises:
        PlatformError: There is no teacher that can be asked, and why.
    """
    until_s = time.monotonic() + timeout_s
    try:
        plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
        plain.setblocking(False)
        with plain if context is None else tls.wrap(plain, context, address.host) as connection:
            stream = FrameStream(connection, Limits(say.STRANGER_HEADER_BYTES))
            ours = proof.new_nonce()
            nonce = _exchange(stream, say.Nonce(say.PROTOCOL, ours), say.FIRST, until_s)
            if isinstance(nonce, say.Refuse):
                raise PlatformError(f"it refused: {nonce.why}")
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
    except ssl.SSLError as error:
        raise PlatformError(tls.explain(error)) from error
    except (OSError, EOFError, ProtocolError) as error:
        raise PlatformError(getattr(error, "strerror", None) or str(error) or "it did not answer in time") from error


def describe_model(model: ModelUrl, context: ssl.SSLContext | None = None, timeout_s: float = 5.0) -> str:
    """What a server of the Open Inference Protocol says of a model. Blocks for at most ``timeout_s``.

    Args:
        model: Model.
        context: How the server is verified, for https; ``None``: by the certificates of this machine.
        timeout_s: Seconds for the reply.

    Raises:
        PlatformError: It does not serve the model, and why.
    """
    try:
        bounds = Bounds(timeout_s, timeout_s, _METADATA_BYTES)
        reply = exchange(urlsplit(str(model)), {}, bounds, SYSTEM_CLOCK, context=context)
        if reply.status != 200:
            raise PlatformError(f"it does not serve the model {model.name!r} ({reason_of(reply.body, reply.status)})")
        inputs = read_inputs(reply.body)
        versions = json.loads(reply.body).get("versions")
        shown = [f"version {', '.join(map(str, versions))}"] if isinstance(versions, list) and versions else []
        shown += [f"takes {', '.join(map(str, inputs))}"] if inputs else []
        return f"{model.name} ({'; '.join(shown)})" if shown else model.name
    except TimeoutError as error:
        raise PlatformError("it did not answer in time") from error
    except BodyTooLongError as error:
        raise PlatformError(f"its description of the model has {error}") from error
    except (OSError, ProtocolError, http.client.HTTPException) as error:
        raise PlatformError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def _exchange(stream: FrameStream, message: Message, known: Vocabulary, until_s: float) -> Message:
    """Say something, and hear what comes next."""
    stream.put(encode(message))
    while True:
        stream.flush()
        frame = stream.receive()
        if frame is not None:
            return decode(frame, known)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise PlatformError("it did not answer in time")
        select.select([stream.connection], [stream.connection] if stream.needs_write else [], [], left_s)
