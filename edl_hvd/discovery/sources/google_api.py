"""Client of Google Cloud over REST, with the standard library: metadata server, its token, Compute Engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.source import Permission
from edl_hvd.discovery.sources.web import (
    LONGEST_BODY_BYTES,
    SOCKET_S,
    WHOLE_S,
    RetryAfter,
    is_clear_text,
    read_address,
    read_token,
)
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.http_client import BodyTooLongError, Bounds, HttpAnswer, LookUpTimeoutError, exchange, without_secrets

METADATA = "metadata.google.internal"
ENDPOINT = "https://compute.googleapis.com/compute/v1/"
METADATA_S = 3.0
# Seconds. The metadata server is a process on the same host; elsewhere its name does not exist.
RENEW_S = 60.0
# Seconds before a token expires: longer than a request takes. The metadata server renews it 5 minutes before.

_NEXT_STEPS = {
    401: "the token is not valid; look at the service account and this machine's clock",
    403: "grant it to the service account, e.g. with roles/compute.viewer, and give the machine the scope compute-ro",
    404: "look at the group, its zone or region, and the project",
    429: "the project asks too often; raise --refresh",
}
_OFTEN = ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded")


class GoogleCloud:
    """Client of Compute Engine, for one thread at a time.

    Args:
        metadata: Host of the metadata server, with ":port" if it is not 80 (``GCE_METADATA_HOST``).
        endpoint: Address of Compute Engine, with "compute/v1/" (``CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE``).
        token_file: File with a token; ``None`` for the token of this machine's service account.
    """

    def __init__(
        self,
        metadata: str = METADATA,
        endpoint: str = ENDPOINT,
        token_file: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._metadata = read_address(f"http://{metadata}/computeMetadata/v1/", "--metadata-host")
        self._endpoint = read_address(f"{endpoint.rstrip('/')}/", "--endpoint")
        if is_clear_text(self._endpoint):
            raise UsageError(f"--endpoint {endpoint!r} would get the token unencrypted; expected https://...")
        self._token_file = token_file
        self._clock = clock
        self._token = ""
        self._token_until_s = 0.0
        self._retry_after = RetryAfter(clock)

    def metadata(self, path: str) -> str:
        """Read an entry of the metadata server, e.g. "instance/zone".

        Raises:
            DiscoveryError: This machine has no metadata server, or it does not answer properly.
        """
        return self._ask_metadata(path).text.strip()

    def _ask_metadata(self, path: str) -> HttpAnswer:
        what = f"the metadata server {self._metadata.netloc}"
        try:
            headers = {"Metadata-Flavor": "Google"}
            answer = _ask("GET", self._metadata, path, headers, METADATA_S, self._clock, what)
        except DiscoveryError as error:
            raise DiscoveryError(
                f"{error}; on a machine outside of Google Cloud give --project, --zone or --region, and --token-file"
            ) from error
        # A server that is not Google's lacks this header, for example that of a captive portal.
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise DiscoveryError(f"{what} answered {answer.status} to {path}: {answer.words()}")
        return answer

    def pages(self, method: str, path: str, items: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """The items of all pages of an answer.

        Raises:
            DiscoveryError: The request is refused, or the answer is cut off or not understood.
        """
        page_token: dict[str, str] = {}
        while True:
            page = self.ask(method, path, {**query, **page_token})
            found = page.get(items, [])
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise DiscoveryError(f"Compute Engine did not answer properly: {items!r} is no list of objects")
            yield from found
            if not page.get("nextPageToken"):
                return
            page_token = {"pageToken": page["nextPageToken"]}

    def ask(self, method: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Make one request; a token that is refused is renewed once.

        Raises:
            DiscoveryError: As ``pages``.
        """
        asked = f"{path}?{urlencode(query)}" if query else path
        answer = self._ask_renewing(method, asked)
        if answer.status != 200:
            raise DiscoveryError(_explain(path, answer))
        return _read_object(answer, "Compute Engine")

    def try_permission(self, name: str, method: str, path: str, query: Mapping[str, str]) -> Permission:
        """Try whether this account may do that, by doing it."""
        try:
            answer = self._ask_renewing(method, f"{path}?{urlencode(query)}")
        except DiscoveryError as error:
            return Permission(name, None, str(error))
        if answer.status == 200:
            return Permission(name, True, "Compute Engine allows it")
        words = _explain(path, answer)
        return Permission(name, False if answer.status == 403 and _NEXT_STEPS[429] not in words else None, words)

    def _ask_renewing(self, method: str, path: str) -> HttpAnswer:
        answer = self._ask_with_token(method, path)
        if answer.status == 401:
            self._token_until_s = 0.0
            answer = self._ask_with_token(method, path)
        return answer

    def _ask_with_token(self, method: str, path: str) -> HttpAnswer:
        self._retry_after.check("Compute Engine")
        headers = {"Authorization": f"Bearer {self._find_token()}"}
        answer = _ask(method, self._endpoint, path, headers, SOCKET_S, self._clock, "Compute Engine")
        self._retry_after.note(answer)
        return answer

    def _find_token(self) -> str:
        if self._token_file:
            return read_token(self._token_file)  # the program that writes it renews it
        now_s = self._clock.monotonic_s()
        if now_s >= self._token_until_s:
            answer = _read_object(self._ask_metadata("instance/service-accounts/default/token"), "the token")
            try:
                self._token, left_s = str(answer["access_token"]), float(answer["expires_in"])
            except (KeyError, TypeError, ValueError) as error:
                raise DiscoveryError("the metadata server answered the request for a token without one") from error
            self._token_until_s = now_s + left_s - RENEW_S
        return self._token


def _read_object(answer: HttpAnswer, what: str) -> dict[str, Any]:
    try:
        told = json.loads(answer.body)
    except (ValueError, RecursionError) as error:  # wrong JSON, wrong characters, or thousands of levels
        raise DiscoveryError(f"{what} did not answer with JSON: {answer.words()!r}") from error
    if not isinstance(told, dict):
        raise DiscoveryError(f"{what} did not answer with an object: {answer.words()!r}")
    return told


def _explain(path: str, answer: HttpAnswer) -> str:
    """Describe a refusal in one line: the request, Google's code and message, what to do."""
    step = _NEXT_STEPS.get(answer.status, "ask again later")
    words = answer.words()
    try:
        told = json.loads(answer.body)["error"]
        words = " ".join(str(told["message"]).split()).rstrip(".")
        if any(entry.get("reason") in _OFTEN for entry in told.get("errors", [])):
            step = _NEXT_STEPS[429]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # another form of error: its text is shown unchanged
    return f"Compute Engine refused {path}: {answer.status}: {words}; {step}"


def _ask(
    method: str, base: SplitResult, path: str, headers: Mapping[str, str], socket_s: float, clock: Clock, what: str
) -> HttpAnswer:
    """Make one request to the server at ``base``, which messages call ``what``."""
    address = urlsplit(f"{base.geturl()}{path}")
    try:
        return exchange(address, headers, Bounds(socket_s, WHOLE_S, LONGEST_BODY_BYTES), clock, method)
    except LookUpTimeoutError as error:
        raise DiscoveryError(f"asking {what} failed: {error}") from error
    except TimeoutError as error:
        raise DiscoveryError(f"{what} did not answer in time") from error
    except BodyTooLongError as error:
        raise DiscoveryError(f"{what} answered with {error}") from error
    except (OSError, http.client.HTTPException) as error:
        words = without_secrets(str(error), headers)
        raise DiscoveryError(f"asking {what} failed: {type(error).__name__}: {words}") from error
