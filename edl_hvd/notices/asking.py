"""One bounded HTTP question to a server that is near."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from edl_hvd.clock import Clock
from edl_hvd.errors import PlatformError

SOCKET_S = 2.0
# For each read. Metadata servers answer within milliseconds; half a second is what a busy one was seen to take.
LONGEST_BODY_BYTES = 1 << 20
# A pod with everything in it is some ten kilobytes.


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        headers: By lower-case name.
        now_s: The time in seconds since the epoch, by the server's clock where it tells, since deadlines are written
            by the clock of the platform and this host's may be wrong.
    """

    status: int
    headers: Mapping[str, str]
    text: str
    now_s: float


def ask(
    base: str,
    path: str,
    headers: Mapping[str, str],
    clock: Clock,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Ask the server at ``base``, e.g. "http://169.254.169.254", on a connection of its own, without any proxy.

    Raises:
        PlatformError: It does not answer.
    """
    address = urlsplit(base)
    host = address.hostname or ""
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(host, address.port, timeout=SOCKET_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, address.port, timeout=SOCKET_S)
    try:
        connection.request(method, address.path.rstrip("/") + path, headers={"Connection": "close", **headers})
        response = connection.getresponse()
        body = response.read(LONGEST_BODY_BYTES + 1)
        if response.length and len(body) <= LONGEST_BODY_BYTES:
            raise http.client.IncompleteRead(body, response.length)
        if len(body) > LONGEST_BODY_BYTES:
            raise PlatformError(f"{base} answered with more than {LONGEST_BODY_BYTES >> 20} MiB to {path}")
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, body.decode(errors="replace"), _now_s(named, clock))
    except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
        raise PlatformError(f"{base} did not answer to {path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def refused(base: str, path: str, answer: Answer) -> PlatformError:
    """For an answer that is none."""
    words = " ".join(answer.text[:200].split())
    return PlatformError(f"{base} answered {answer.status} to {path}: {words}")


def _now_s(headers: Mapping[str, str], clock: Clock) -> float:
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return clock.wall_s()
