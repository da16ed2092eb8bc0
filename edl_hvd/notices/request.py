"""One HTTP request to a nearby server; each failure is one line."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from edl_hvd.clock import Clock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import BodyTooLongError, Bounds, HttpAnswer, exchange

SOCKET_S = 2.0
# Seconds for each read. Metadata servers answer within milliseconds; a busy one took 0.5 s.
WHOLE_S = 4.0
# Seconds for all reads of one answer, so that a slow stream ends, too.
LONGEST_BODY_BYTES = 1 << 20
# A pod with all its fields has some ten kilobytes.


def request(
    base: str,
    path: str,
    headers: Mapping[str, str],
    clock: Clock,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """Make a request to the server at ``base``, e.g. "http://169.254.169.254".

    Raises:
        PlatformError: The server does not answer.
    """
    try:
        bounds = Bounds(SOCKET_S, WHOLE_S, LONGEST_BODY_BYTES)
        return exchange(urlsplit(base + path), headers, bounds, clock, method, context)
    except BodyTooLongError as error:
        raise PlatformError(f"{base} answered with {error} to {path}") from error
    except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
        raise PlatformError(f"{base} did not answer to {path}: {type(error).__name__}: {error}") from error


def refusal(base: str, path: str, answer: HttpAnswer) -> PlatformError:
    """An error for an answer with an unexpected status."""
    return PlatformError(f"{base} answered {answer.status} to {path}: {answer.words()}")
