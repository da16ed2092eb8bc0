"""HTTP requests of sources: addresses, tokens and certificates that users give, and redirects."""

from __future__ import annotations

import http.client
import math
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, urljoin, urlsplit

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import read_count
from edl_hvd.http_client import BodyTooLongError, Bounds, HttpAnswer, LookUpTimeoutError, exchange, without_secrets

LONGEST_BODY_BYTES = 32 << 20
# Five hundred pods are a few megabytes; a longer answer is no list of hosts.
SOCKET_S = 8.0
# Seconds for each read: a server under load answers within one or two.
WHOLE_S = 20.0
# Seconds for all reads of one answer, so that a slow stream ends, too.
REDIRECTS = 3
# A slash at the end and a newer path; more are a circle.
LONGEST_RETRY_S = 300.0
# As long as a last answer counts: a server that asks for more is asked once in this time.
_BUSY = (429, 503)
_REDIRECTING = (301, 302, 303, 307, 308)


def read_address(text: str, flag: str) -> SplitResult:
    """Split a URL into its parts.

    Raises:
        UsageError: The URL is not of http or https, has no host, or has a password.
    """
    try:
        address = urlsplit(text)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable or not text.isascii() or any(character.isspace() for character in text):
        raise UsageError(f"{flag} {text!r} is not usable; expected e.g. https://hosts.example.com/job-7")
    if address.username is not None or address.password is not None:
        raise UsageError(f"{flag} holds a user or a password, which logs would show; put a token into --token-file")
    return address


def is_clear_text(address: SplitResult) -> bool:
    """Whether a token would go to ``address`` unencrypted, over a network that others may read."""
    return address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1", "::1")


class RetryAfter:
    """When a server may be asked again: 429 and 503 may say so in ``Retry-After`` (RFC 9110, section 10.2.3).

    A source keeps one for each server. Until then it fails without a request, and its last answer counts as long as
    after any other failure.

    Args:
        clock: Clock that measures the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = -math.inf

    def check(self, place: str) -> None:
        """Raise until the time is over.

        Raises:
            DiscoveryError: It is too early to ask.
        """
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s > 0:
            raise DiscoveryError(f"{place} asked to be left alone for another {left_s:.0f} s (Retry-After)")

    def note(self, answer: HttpAnswer) -> None:
        """Keep what an answer says about the next request; at most ``LONGEST_RETRY_S`` of it."""
        text = answer.headers.get("retry-after", "").strip()
        if answer.status in _BUSY and text:
            self._until_s = self._clock.monotonic_s() + min(_read_retry(text, answer, self._clock), LONGEST_RETRY_S)


def _read_retry(text: str, answer: HttpAnswer, clock: Clock) -> float:
    """The seconds of a number or of a date; 0 for another text, which says nothing."""
    number = read_count(text)
    if number is not None:
        return float(number)
    try:
        return parsedate_to_datetime(text).timestamp() - answer.now_s(clock)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def http_get(
    url: str,
    headers: Mapping[str, str],
    context: ssl.SSLContext | None = None,
    socket_s: float = SOCKET_S,
    whole_s: float = WHOLE_S,
    clock: Clock = SYSTEM_CLOCK,
) -> HttpAnswer:
    """Make a GET request; redirects are followed to the same host and port only, to protect the token.

    Raises:
        DiscoveryError: There is no answer, or it is incomplete, too long, or a redirect to another place.
    """
    deadline_s = clock.monotonic_s() + whole_s
    for _ in range(REDIRECTS + 1):
        address = urlsplit(url)
        bounds = Bounds(socket_s, deadline_s - clock.monotonic_s(), LONGEST_BODY_BYTES)
        try:
            answer = exchange(address, headers, bounds, clock, context=context)
        except LookUpTimeoutError as error:
            raise DiscoveryError(f"asking {_place(address)} failed: {error}") from error
        except TimeoutError as error:
            waited_s = whole_s if clock.monotonic_s() >= deadline_s else socket_s
            raise DiscoveryError(f"{_place(address)} did not answer within {waited_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise DiscoveryError(
                f"the certificate of {_place(address)} is not trusted: {error.verify_message}"
            ) from error
        except http.client.IncompleteRead as error:
            raise DiscoveryError(f"the answer of {_place(address)} was cut off; ask again") from error
        except BodyTooLongError as error:
            raise DiscoveryError(f"{_place(address)} answered with {error}") from error
        except (OSError, http.client.HTTPException) as error:
            words = without_secrets(str(error), headers)
            raise DiscoveryError(f"asking {_place(address)} failed: {type(error).__name__}: {words}") from error
        if answer.status not in _REDIRECTING or "location" not in answer.headers:
            return answer
        url = urljoin(url, answer.headers["location"])
        if _origin(urlsplit(url)) != _origin(address):
            raise DiscoveryError(f"{_place(address)} sends elsewhere, to {url!r}; if that is right, give that address")
    raise DiscoveryError(f"{_place(address)} redirects more than {REDIRECTS} times; give the last address")


def _origin(address: SplitResult) -> tuple[str, str | None, int]:
    return address.scheme, address.hostname, address.port or {"http": 80, "https": 443}.get(address.scheme, 0)


def _place(address: SplitResult) -> str:
    """The address without its query, which may have a secret."""
    return f"{address.scheme}://{address.netloc}{address.path}"


def read_token(path: str) -> str:
    """Read a bearer token from a file, each time, because tokens are renewed there.

    Raises:
        DiscoveryError: The file cannot be read or has no token.
    """
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except OSError as error:
        raise DiscoveryError(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DiscoveryError(f"the token file {path} does not hold a token: it is not text") from error
    if not token or any(character.isspace() or not character.isprintable() for character in token):
        raise DiscoveryError(f"the token file {path} does not hold a token; expected one word on one line")
    return token


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that verifies servers by the certificates of a file, with ``None`` by those of this machine.

    Raises:
        DiscoveryError: The file cannot be read or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise DiscoveryError(f"the file of certificates {ca_file} holds none: {error.reason}") from error
    except OSError as error:
        raise DiscoveryError(f"cannot read the file of certificates {ca_file}: {error.strerror}") from error
