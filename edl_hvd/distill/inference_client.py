"""One connection of the student to a server of the Open Inference Protocol: what is said on it, and what that means.

Knows no other connection, and neither tasks nor threads; ``requesting.py`` decides what is asked, and when again.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from edl_hvd.distill import conversation as say
from edl_hvd.distill.call import LastingError
from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frames import Array, ArrayType
from edl_hvd.open_inference import (
    HEADER_LENGTH,
    NUMBER_BYTES,
    InferenceRequest,
    ModelUrl,
    has_json_numbers,
    make_request,
    named_inputs,
    read_answer,
    read_inputs,
    reason_of,
)  # fmt: skip
from edl_hvd.silence import ask_for_answers, unanswered_s

_CONNECT_S = 10.0
_METADATA_BYTES = 1 << 20
_FIRST_ANSWER_BYTES = 1 << 28
# Before it is known how large an answer is.
_JSON_BYTES = 1 << 16
_BUSY = (429, 502, 503, 504)
# The server, or what stands before it, cannot take a request now; the input is not to blame.

Convert = Callable[[tuple[Array, ...]], tuple[Array, ...]]


class ServerBusyError(Exception):
    """The server takes no requests now."""


@dataclass(frozen=True)
class HttpReply:
    """What a server replied.

    Attributes:
        status: Status of HTTP.
        header_length: Header that says where raw bytes begin; ``None`` without.
        body: Body, of bounded size.
    """

    status: int
    header_length: str | None
    body: bytearray

    @property
    def reason(self) -> str:
        """Why it holds no answer."""
        return reason_of(self.body, self.status)


@dataclass(frozen=True)
class ServedModel:
    """A model, as its server has answered for it.

    Attributes:
        teaching: What it teaches.
        inputs: Names of its inputs, in the order of what is sent.
        is_binary: Whether it takes raw bytes.
        most_bytes: Largest answer, in JSON or raw.
    """

    teaching: say.Teaching
    inputs: tuple[str, ...]
    is_binary: bool
    most_bytes: int

    def read(self, reply: HttpReply, samples: int, convert: Convert) -> tuple[Array, ...]:
        """The answer to a task, from the reply to it.

        Args:
            reply: Reply.
            samples: Number of samples in the task.
            convert: Makes an answer of the outputs of a server; raises ``UsageError`` where it cannot.

        Raises:
            ServerBusyError: The server takes no requests now.
            ProtocolError: It has no answer to this task.
            UsageError: It has none that can be used.
        """
        if reply.status in _BUSY:
            raise ServerBusyError(f"it takes no requests now ({reply.reason})")
        if reply.status != 200:
            raise ProtocolError(reply.reason)
        answer = convert(_outputs_of(reply, samples))
        say.check_arrays(answer, self.teaching.answer, samples)
        return answer


class InferenceClient:
    """A connection to the server of a model, made when it is needed. One thread; ``cut`` may be called from any.

    Args:
        model: Model.
        context: How a server is verified, for https.
    """

    def __init__(self, model: ModelUrl, context: ssl.SSLContext | None) -> None:
        self._model, self._context = model, context
        self._connection: http.client.HTTPConnection | None = None
        self._is_cut = False

    def introduce(self, hello: say.Hello, fingerprint: str, convert: Convert) -> ServedModel:
        """Ask what the model is, and for one answer. Blocks.

        Args:
            hello: What will be sent.
            fingerprint: Fingerprint that the script vouches for, as the protocol has none; empty without.
            convert: See :meth:`ServedModel.read`.

        Raises:
            OSError: There is no server, or it has gone.
            ServerBusyError: It is not ready.
            LastingError, ProtocolError, UsageError: It cannot be used until a person changes something.
        """
        model = self._model
        reply = self._ask("GET", model.path, _METADATA_BYTES)
        if reply.status in _BUSY or (reply.status != 200 and not self._is_server_ready()):
            raise ServerBusyError(f"it is not ready ({reply.reason})")
        if reply.status != 200:
            raise LastingError(
                f"it does not serve the model {model.name!r} ({reply.reason}); name one that it has loaded"
            )
        inputs = named_inputs(read_inputs(bytes(reply.body)), hello.send, hello.micro_batch)
        probe = tuple(
            Array(whole, bytes(whole.size_bytes))
            for whole in (ArrayType(one.name, one.dtype, (hello.micro_batch, *one.shape)) for one in hello.send)
        )
        # Servers that take raw bytes send them, too, when they are asked to, whether they list the extension or not.
        is_binary = not has_json_numbers(hello.send)
        reply = self._infer(inputs, probe, is_binary, _FIRST_ANSWER_BYTES)
        if reply.status in _BUSY:
            raise ServerBusyError(f"it is not ready ({reply.reason})")
        if reply.status != 200:
            sent = ", ".join(str(one.type) for one in probe)
            raise LastingError(f"its model fails on a micro-batch of {sent}: {reply.reason}")
        outputs = _outputs_of(reply, hello.micro_batch)
        rows = tuple(ArrayType(one.type.name, one.type.dtype, one.type.shape[1:]) for one in convert(outputs))
        return ServedModel(
            say.Teaching(str(model), model.name, fingerprint, rows, hello.micro_batch),
            inputs,
            is_binary or reply.header_length is not None,
            _JSON_BYTES + NUMBER_BYTES * sum(one.type.size_bytes for one in outputs),
        )

    def infer(self, served: ServedModel, arrays: tuple[Array, ...]) -> HttpReply:
        """Ask for the answer to a task. Blocks for as long as the server's host is there.

        Raises:
            OSError: There is no server, or it has gone.
            ProtocolError: It does not speak HTTP, or replies more than an answer has.
        """
        return self._infer(served.inputs, arrays, served.is_binary, served.most_bytes)

    def _infer(self, inputs: tuple[str, ...], arrays: tuple[Array, ...], is_binary: bool, most_bytes: int) -> HttpReply:
        return self._ask("POST", f"{self._model.path}/infer", most_bytes, make_request(inputs, arrays, is_binary))

    def _is_server_ready(self) -> bool:
        """Whether the server has loaded all that it is going to serve."""
        return self._ask("GET", f"{self._model.root}/health/ready", _METADATA_BYTES).status == 200

    def _ask(self, method: str, path: str, most_bytes: int, request: InferenceRequest | None = None) -> HttpReply:
        """Ask, and wait for the reply.

        A connection on which a request has been answered may have been closed since then, so it is tried anew once.
        """
        if self._is_cut:
            self.close()
            self._is_cut = False
        was_used = self._connection is not None
        try:
            return self._exchange(method, path, most_bytes, request)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if self._is_cut:
                raise OSError("its host has not answered") from error
            if not (was_used and isinstance(error, ConnectionError)):
                raise _as_os_error(error) from error
        try:
            return self._exchange(method, path, most_bytes, request)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _as_os_error(error) from error

    def _exchange(self, method: str, path: str, most_bytes: int, request: InferenceRequest | None) -> HttpReply:
        connection = self._connection or self._connect()
        headers = dict(request.headers) if request else {}
        connection.request(method, path, request.parts if request else None, headers)
        response = connection.getresponse()
        length = response.length
        if length is None:
            body = bytearray(response.read(most_bytes + 1))
        else:
            body = bytearray(min(length, most_bytes + 1))
            filled = 0
            while filled < len(body) and (count := response.readinto(memoryview(body)[filled:])):
                filled += count
            if filled < len(body):
                raise http.client.IncompleteRead(b"", len(body) - filled)
        if len(body) > most_bytes:
            self.close()
            raise ProtocolError(f"it replied more than {most_bytes} bytes, the most that an answer here has")
        if response.will_close:
            self.close()
        return HttpReply(response.status, response.getheader(HEADER_LENGTH), body)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._model.host, self._model.port
        if self._model.scheme == "https":
            context = self._context or ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_CONNECT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        connection.connect()
        # The thread that watches ends a wait for a host that is gone.
        connection.sock.settimeout(None)
        ask_for_answers(connection.sock)
        self._connection = connection
        return connection

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the server's host; any thread."""
        connection = self._connection
        try:
            return unanswered_s(connection.sock) if connection is not None and connection.sock is not None else 0.0
        except OSError:
            return 0.0

    def cut(self) -> None:
        """End a wait of the thread that uses it, which gets an ``OSError``; any thread."""
        self._is_cut = True
        connection = self._connection
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close it; it is made again when it is needed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return OSError(f"its certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return OSError(f"it does not speak TLS as expected: {error.reason or error}")
    if isinstance(error, OSError):
        return error
    return OSError(f"the connection ended in the middle of an answer ({type(error).__name__})")


def _outputs_of(reply: HttpReply, samples: int) -> tuple[Array, ...]:
    """The outputs in a reply, which have one row for each sample."""
    outputs = read_answer(reply.body, reply.header_length)
    for one in outputs:
        if one.type.shape[:1] != (samples,):
            raise UsageError(
                f"its model returns {one.type} for {samples} samples; expected one row for each: choose a model whose "
                "outputs have the batch first"
            )
    return outputs
