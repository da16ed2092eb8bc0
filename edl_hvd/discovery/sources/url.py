"""Hosts that a web server lists, as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, HostDetails, Permission, Source
from edl_hvd.discovery.sources.web import RetryAfter, http_get, is_clear_text, read_address, read_token, ssl_context
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host
from edl_hvd.http_client import HttpAnswer, seconds_since_epoch

_TEXT_FORM = "expected 'host:slots' lines, '#' before a comment"
_JSON_FORM = '{"hosts": [{"host": "a", "slots": 4}]} or {"a": 4}'
_KNOWN = ("host", "slots", "price_usd_per_h", "kind", "zone", "since", "notice_s")
_NEXT_STEPS = {
    401: "give a valid token with --token-file, or renew it",
    403: "let this token read the address",
    404: "correct the address",
    429: "it is asked too often; raise --refresh",
}


class Url(Source):
    """The hosts in the answer to a GET of ``url``.

    Text has one ``host`` or ``host:slots`` line per host, and ``#`` before a comment; text without a host is an error,
    because it may be anything. JSON is ``{"a": 4}``, or ``{"hosts": [...]}`` with objects that have ``host`` and
    ``slots``, optionally ``price_usd_per_h``, ``kind``, ``zone``, ``since`` (seconds since the epoch, or ISO 8601 with
    a time zone) and ``notice_s`` (seconds until the host is gone). An empty list states that there are no hosts.

    After an answer with an ``ETag`` the next request has ``If-None-Match``: 304 stands for the same answer.

    Args:
        url: Address of http or https.
        slots: Number of slots of a host that names none; ``None`` if each host has to name them.
        token_file: File with a bearer token, which is read at each request.
        ca_file: File of certificates that verify the server; ``None`` for those of this machine.
        clock: Clock of notices.
    """

    def __init__(
        self,
        url: str,
        slots: int | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        address = read_address(url, "--url")
        if token_file and is_clear_text(address):
            raise UsageError(f"--url {url!r} would carry the token of --token-file unencrypted; expected https://...")
        self._url = url
        self._shown = url.partition("?")[0]
        self._slots = slots
        self._token_file = token_file
        self._ca_file = ca_file
        self._clock = clock
        self._tag = ""
        self._listed = Answer()
        self._listed_s = 0.0
        self._retry_after = RetryAfter(clock)

    def answer(self) -> Answer:
        answer = self._ask()
        if answer.status == 304 and self._tag:
            return self._listed.later(self._clock.monotonic_s() - self._listed_s)
        if answer.status != 200:
            raise DiscoveryError(self._explain(answer))
        try:
            listed = read_listed(answer, self._slots)
        except (DiscoveryError, UsageError) as error:
            raise DiscoveryError(
                f"{self._shown} answered with something that is not a list of hosts: {error}"
            ) from error
        self._listed, self._listed_s = listed, self._clock.monotonic_s()
        self._tag = answer.headers.get("etag", "")
        return listed

    def _ask(self) -> HttpAnswer:
        headers = {"Accept": "application/json, text/plain"}
        if self._token_file:
            headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
        if self._tag:
            headers["If-None-Match"] = self._tag
        context = ssl_context(self._ca_file) if self._url.startswith("https:") else None
        self._retry_after.check(self._shown)
        answer = http_get(self._url, headers, context, clock=self._clock)
        self._retry_after.note(answer)
        return answer

    def _explain(self, answer: HttpAnswer) -> str:
        step = _NEXT_STEPS.get(answer.status, "see its words" if answer.words() else "see the server's log")
        return f"{self._shown} answered with status {answer.status}: {answer.words() or 'no words'}; {step}"

    def permissions(self) -> Iterable[Permission]:
        name = f"GET {self._shown}"
        try:
            answer = self._ask()
        except DiscoveryError as error:
            yield Permission(name, None, str(error))
            return
        words = f"status {answer.status}" if answer.status in (200, 304) else self._explain(answer)
        yield Permission(name, answer.status in (200, 304), words)


# --- the answer: pure ---


def read_listed(answer: HttpAnswer, slots: int | None) -> Answer:
    """Read the hosts of an answer with status 200, and their details.

    Raises:
        DiscoveryError, UsageError: The answer is wrong; the message says why.
    """
    try:
        text = answer.body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DiscoveryError(f"it is no text: {error}") from error
    if text.lstrip().startswith("{"):
        return _read_json(text, slots)
    if not answer.is_whole:
        raise DiscoveryError("it is text of unknown length, of which the end may be missing; send Content-Length")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    hosts = [_read_line(line, slots) for line in lines if line]
    if not hosts:
        raise DiscoveryError(f"it lists no host; {_TEXT_FORM}, or JSON for none: {{}}")
    return Answer(tuple(hosts))


def _read_line(line: str, slots: int | None) -> HostSlots:
    if slots is None and ":" not in line:
        raise UsageError(f"{line[:80]!r} names no slots; {_TEXT_FORM}, or --slots")
    try:
        return parse_host(line, slots or 1)
    except UsageError as error:
        raise UsageError(f"{line[:80]!r}: {error}") from error


def _read_json(text: str, slots: int | None) -> Answer:
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
    except ValueError as error:
        raise DiscoveryError(f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise DiscoveryError(f"it is JSON of too many levels; expected {_JSON_FORM}") from error
    if isinstance(content.get("hosts"), list):
        return _read_entries(content["hosts"], slots)
    return Answer(tuple(HostSlots(host, _read_slots(host, count, slots)) for host, count in content.items()))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return named


def _read_slots(host: str, count: object, slots: int | None) -> int:
    if count is None and slots is not None:
        return slots
    if isinstance(count, bool) or not isinstance(count, int):
        raise UsageError(
            f"host {str(host)[:80]!r} has the slots {count!r}; expected a whole number, as in {_JSON_FORM}"
        )
    return count


def _read_entries(entries: list[Any], slots: int | None) -> Answer:
    hosts: list[HostSlots] = []
    details: dict[str, HostDetails] = {}
    notices: dict[str, float] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("host"), str):
            raise UsageError(f"{str(entry)[:80]} is no host; expected as in {_JSON_FORM}")
        name = entry["host"]
        unknown = [str(key) for key in entry if key not in _KNOWN]
        if unknown:
            raise UsageError(f"host {name!r} has {', '.join(unknown)}; accepted: {', '.join(_KNOWN)}")
        hosts.append(HostSlots(name, _read_slots(name, entry.get("slots"), slots)))
        name = hosts[-1].host
        price, since, notice_s = (entry.get(key) for key in ("price_usd_per_h", "since", "notice_s"))
        details[name] = HostDetails(
            kind=_read_word(name, "kind", entry),
            zone=_read_word(name, "zone", entry),
            price_usd_per_h=None if price is None else _read_number(name, "price_usd_per_h", price),
            since_s=None if since is None else _read_time(name, since),
        )
        if notice_s is not None:
            notices[name] = _read_number(name, "notice_s", notice_s)
    return Answer(tuple(hosts), notices, details)


def _read_word(host: str, key: str, entry: Mapping[str, Any]) -> str:
    word = entry.get(key) or ""
    if not isinstance(word, str):
        raise UsageError(f"host {host!r} has the {key} {word!r}; expected text")
    return word


def _read_number(host: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not math.isfinite(value):
        raise UsageError(f"host {host!r} has the {key} {value!r}; expected a number, at least 0")
    return float(value)


def _read_time(host: str, value: object) -> float:
    if not isinstance(value, str):
        return _read_number(host, "since", value)
    try:
        return seconds_since_epoch(value)
    except ValueError as error:
        raise UsageError(f"host {host!r} is there since {value!r}; expected e.g. '2026-01-31T12:00:00Z'") from error


FLAGS, BARE_FLAG = ("url", "slots", "token-file", "ca-file", *REMOTE_FLAGS), "url"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_url``."""
    flags.needed("url", "address", "from_url https://hosts.example.com/job-7")
    source = Url(
        flags.text("url", ""),
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        token_file=flags.text("token-file", "") or None,
        ca_file=flags.text("ca-file", "") or None,
    )
    return remote_source(source, flags)
