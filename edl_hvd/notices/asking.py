"""One question to a server that is near, and a line for each way in which it is not answered."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from edl_hvd.clock import Clock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import BodyTooLongError, Bounds, HttpAnswer, exchange

SOCKET_S = 2.0
# For each read. Metadata servers answer within milliseconds; half a second is what a busy one was seen to take.
WHOLE_S = 4.0
# For all reads of one answer, so that one that trickles ends, too.
LONGEST_BODY_BYTES = 1 << 20
# A pod with everything in it is some ten kilobytes.


def ask(
    base: str,
    path: str,
    headers: Mapping[str, str],
    clock: Clock,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """Ask the server at ``base``, e.g. "http://169.254.169.254".

    Raises:
        PlatformError: It does not answer.
    """
    try:
        bounds = Bounds(SOCKET_S, WHOLE_S, LONGEST_BODY_BYTES)
        return exchange(urlsplit(base + path), headers, bounds, clock, method, context)
    except BodyTooLongError as error:
        raise PlatformError(f"{base} answered with {error} to {path}") from error
    except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
        raise PlatformError(f"{base} did not answer to {path}: {type(error).__name__}: {error}") from error


def refused(base: str, path: str, answer: HttpAnswer) -> PlatformError:
    """For an answer that is none."""
    return PlatformError(f"{base} answered {answer.status} to {path}: {answer.words()}")
