"""What the clients of a key-value store send, and what they are answered, as bytes.

Clients speak as Horovod's ``HTTPStore`` does (``horovod/common/gloo/http_store.cc`` and ``HTTPRequest.hpp`` of 0.28.1):
GET, PUT and DELETE of ``/scope/key``, each on a connection of its own, with a ``Content-Length`` and no ``Expect``.
The mended Horovod (``build/edits/gloo_mesh.py``) asks once per context: ``PUT /scope/rank?of=size`` is answered when
all ranks have put theirs, with all values in rank order, each behind its length in four bytes. Where one of them goes
before, the others are answered 410. With ``&stay`` the connections stay open: a rank that says ``leave`` goes
regularly, any other end of its connection is told to all others as ``gone RANK``, and a store that is closed regularly
says ``end``.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

LARGEST_VALUE_BYTES = 1 << 20  # Gloo stores 136 bytes per rank, enough for 7,700 ranks
LEAVE, GONE, END = b"leave", b"gone ", b"end"
_LARGEST_HEAD_BYTES = 8 << 10  # HTTPStore sends some 100

_PATH = r"/[!-.0-~]+/[!-.0-~]+"
_VALID_PATH = re.compile(_PATH)
_HEAD = re.compile(
    rb"(GET|PUT|DELETE) (" + _PATH.encode() + rb") HTTP/1\.[01]\r\n(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\0\r\n]*\r\n)*\r\n"
)
_EXCHANGE = re.compile(r"(/[!-.0-~]+/)([0-9]{1,9})\?of=([0-9]{1,9})(&stay)?")
_AUTHORIZATION = re.compile(rb"\r\nauthorization:[ \t]*bearer ([^\r\n]*)", re.IGNORECASE)
_FRAMING = re.compile(rb"\r\n(content-length|transfer-encoding):([^\r\n]*)", re.IGNORECASE)

_ANSWERS = {
    status: b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: " % (status, reason)
    for status, reason in {
        200: b"OK",
        400: b"Bad Request",
        401: b"Unauthorized",
        404: b"Not Found",
        410: b"Gone",
        413: b"Content Too Large",
        431: b"Request Header Fields Too Large",
        507: b"Insufficient Storage",
    }.items()
}
_STAYING = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"  # up to the end of the connection


class RequestRefused(Exception):
    """A request that is not served.

    Args:
        status: Status that it is answered with.
    """

    def __init__(self, status: int) -> None:
        self.status = status


class StoreRequest(NamedTuple):
    """A request whose head is there.

    Attributes:
        method: ``GET``, ``PUT`` or ``DELETE``.
        path: Path, with what follows a question mark.
        body_from: Place of the first byte of its body.
        body_to: Place behind the last one.
    """

    method: bytes
    path: str
    body_from: int
    body_to: int


@dataclass(frozen=True)
class ExchangeRequest:
    """What a rank that puts its value for all ranks of a context asks for.

    Attributes:
        scope: The context.
        rank: The rank, below ``size``.
        size: Number of ranks.
        stays: Whether its connection stays open.
    """

    scope: str
    rank: int
    size: int
    stays: bool


def is_path(text: str) -> bool:
    """Whether a value can be put there: ``/scope/key`` of visible ASCII characters."""
    return _VALID_PATH.fullmatch(text) is not None


def read_request(received: bytes | bytearray, token: bytes) -> StoreRequest | None:
    """The request that these bytes begin with; ``None`` while its head is incomplete.

    >>> read_request(b"PUT /scope/key HTTP/1.1\\r\\nContent-Length: 5\\r\\n\\r\\nva", b"")
    StoreRequest(method=b'PUT', path='/scope/key', body_from=46, body_to=51)

    Args:
        received: What has come of it.
        token: What the client has to know; empty: nothing.

    Raises:
        RequestRefused: It has another form, does not know the token, or announces too large a value.
    """
    # Looked for before the expression runs, so that a head that comes byte by byte is not parsed at every byte.
    end = received.find(b"\r\n\r\n", 0, _LARGEST_HEAD_BYTES) + 4
    if end < 4:
        if len(received) >= _LARGEST_HEAD_BYTES:
            raise RequestRefused(431)
        return None
    head = _HEAD.fullmatch(received, 0, end)
    if head is None:
        raise RequestRefused(400)
    method, path = head.groups()
    given = _AUTHORIZATION.search(received, 0, end)
    if token and not (given and hmac.compare_digest(bytes(given[1]), token)):
        raise RequestRefused(401)
    framing = _FRAMING.findall(received, 0, end)
    length = _length(framing) if framing else None
    if (length is None) if method == b"PUT" else length:
        raise RequestRefused(400)
    return StoreRequest(bytes(method), path.decode("ascii"), end, end + (length or 0))


def _length(framing: list[tuple[bytes, bytes]]) -> int:
    # Two lengths, or chunks, are what makes two readers of one request disagree about its end.
    if len(framing) != 1 or framing[0][0][:1] in b"Tt":
        raise RequestRefused(400)
    digits = framing[0][1].strip(b" \t")
    if not digits.isdigit():
        raise RequestRefused(400)
    if len(digits) > 9 or int(digits) > LARGEST_VALUE_BYTES:
        raise RequestRefused(413)
    return int(digits)


def read_exchange(path: str) -> ExchangeRequest:
    """What a path with a question mark asks for.

    >>> read_exchange("/scope/1?of=4")
    ExchangeRequest(scope='/scope/', rank=1, size=4, stays=False)

    Raises:
        RequestRefused: It has another form, or its rank is none of that many.
    """
    match = _EXCHANGE.fullmatch(path)
    if match is None or int(match[2]) >= int(match[3]):
        raise RequestRefused(400)
    return ExchangeRequest(match[1], int(match[2]), int(match[3]), stays=match[4] is not None)


def whole_answer(status: int, body: bytes = b"") -> bytes:
    """The whole answer to a request."""
    return b"%b%d\r\n\r\n%b" % (_ANSWERS[status], len(body), body)


def staying_answer(body: bytes) -> bytes:
    """The beginning of an answer that goes on until the connection ends."""
    return _STAYING + body


def joined(values: Iterable[bytes]) -> bytes:
    """The values of all ranks as one body.

    >>> joined([b"a", b"bc"])
    b'\\x00\\x00\\x00\\x01a\\x00\\x00\\x00\\x02bc'
    """
    return b"".join(len(value).to_bytes(4, "big") + value for value in values)
