"""Combinations of sources: unions, at most N slots, the cheapest first. ``expression.py`` reads their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.expression import Count, Expression, Leaf, Limit, Prefer, UnionOf, parse_expression
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import KINDS, REMOTE_FLAGS, PolledSource, make_source
from edl_hvd.discovery.source import Answer, HostDetails, Source
from edl_hvd.discovery.sources.part import RememberedSource
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

CHEAPER = 0.8
# A host in use is replaced by one that costs less than this fraction of its price: spot prices of one type differ by
# less between zones and days, and a replacement costs every worker a resize.


class UnionSource(Source):
    """The hosts of all parts; for a host of several parts the slots of the first one.

    The last good answer of a part replaces one that fails, for the part's own ``stale_s``; then the union fails,
    because a lost host is worse than an old one. The same holds for the first answer of a part without hosts.
    """

    def __init__(self, parts: Sequence[RememberedSource]) -> None:
        self._parts = tuple(parts)
        self.parts = tuple(part.source for part in parts)

    def answer(self) -> Answer:
        for part in self._parts:
            part.start()
        return join([part.answer() for part in self._parts])

    def memory(self, now_s: float) -> object:
        return {part.name: part.memory(now_s) for part in self._parts}

    def recall(self, memory: object, now_s: float) -> None:
        for part in self._parts:
            part.recall(memory.get(part.name) if isinstance(memory, dict) else None, now_s)


class Selection(Source):
    """At most ``most`` of a source's hosts: hosts in use first, or the cheapest first.

    Args:
        source: Source to select from.
        most: Largest number of slots or hosts.
        name: Name of the combination, for the reason why a host is left out.
        cheapest_first: Whether hosts are ordered by their price per slot. A host in use is replaced only by one below
            ``CHEAPER`` of its price, and hosts without a price come last.
    """

    def __init__(self, source: Source, most: Count, name: str, cheapest_first: bool) -> None:
        self.parts = (source,)
        self._most = most
        self._name = name
        self._cheapest_first = cheapest_first
        self._in_use: frozenset[str] = frozenset()

    def answer(self) -> Answer:
        found = self.parts[0].answer()
        prices = price_of_slots(found) if self._cheapest_first else {}
        ordered = (
            in_order(found.hosts, prices, self._in_use)
            if self._cheapest_first
            else in_use_first(found.hosts, self._in_use)
        )
        chosen = take(ordered, self._most)
        self._in_use = frozenset(entry.host for entry in chosen)
        surplus = {
            entry.host: self._reason(prices.get(entry.host)) for entry in found.hosts if entry.host not in self._in_use
        }
        return replace(
            found,
            hosts=chosen,
            notices={host: left_s for host, left_s in found.notices.items() if host not in surplus},
            details={host: one for host, one in found.details.items() if host in self._in_use},
            left_out={**found.left_out, **surplus},
        )

    def _reason(self, price_usd: float | None) -> str:
        full = f"{self._name} has its {self._most.number} {self._most.unit}"
        if not self._cheapest_first:
            return full
        return f"{full}; its price is not known" if price_usd is None else f"{full} from cheaper hosts"

    def memory(self, now_s: float) -> object:
        return {"in use": sorted(self._in_use), "source": self.parts[0].memory(now_s)}

    def recall(self, memory: object, now_s: float) -> None:
        known = memory if isinstance(memory, dict) else {}
        in_use = known.get("in use")
        self._in_use = frozenset(map(str, in_use)) if isinstance(in_use, list) else frozenset()
        self.parts[0].recall(known.get("source"), now_s)


# --- which hosts: pure ---


def join(answers: Sequence[Answer]) -> Answer:
    """Join answers; a host of several has the slots and details of the first, and the earliest notice."""
    hosts: dict[str, HostSlots] = {}
    notices: dict[str, float] = {}
    details: dict[str, HostDetails] = {}
    left_out: dict[str, str] = {}
    for answer in answers:
        for entry in answer.hosts:
            hosts.setdefault(entry.host, entry)
        for host, left_s in answer.notices.items():
            notices[host] = min(left_s, notices.get(host, left_s))
        details = {**answer.details, **details}
        left_out.update(answer.left_out)
    age_s = max(answer.age_s for answer in answers)
    warning = "; ".join(answer.warning for answer in answers if answer.warning)
    return Answer(tuple(hosts.values()), notices, details, left_out, age_s, warning)


def price_of_slots(found: Answer) -> dict[str, float]:
    """The price of a slot of each host for an hour, where it is known."""
    prices = {host: one.price_usd_per_h for host, one in found.details.items()}
    known = {entry: prices.get(entry.host) for entry in found.hosts}
    return {entry.host: price / entry.slots for entry, price in known.items() if price is not None}


def in_order(found: Iterable[HostSlots], prices: Mapping[str, float], in_use: frozenset[str]) -> tuple[HostSlots, ...]:
    """Order hosts by price; a host in use counts as cheaper by the factor ``CHEAPER``.

    >>> a, b = HostSlots("a", 1), HostSlots("b", 1)
    >>> [entry.host for entry in in_order((a, b), {"a": 1.0, "b": 0.9}, frozenset("a"))]
    ['a', 'b']
    >>> [entry.host for entry in in_order((a, b), {"a": 1.0, "b": 0.7}, frozenset("a"))]
    ['b', 'a']
    """

    def rank(entry: HostSlots) -> tuple[float, bool, str]:
        price = prices.get(entry.host, math.inf)
        return price * (CHEAPER if entry.host in in_use else 1.0), entry.host not in in_use, entry.host

    return tuple(sorted(found, key=rank))


def in_use_first(found: Iterable[HostSlots], in_use: frozenset[str]) -> tuple[HostSlots, ...]:
    """Order hosts: those in use first, then by name, so that every process chooses the same."""
    return tuple(sorted(found, key=lambda entry: (entry.host not in in_use, entry.host)))


def take(ordered: Iterable[HostSlots], most: Count) -> tuple[HostSlots, ...]:
    """Take the first hosts up to a count; the last one with fewer slots where the count asks for that.

    >>> hosts = (HostSlots("a", 3), HostSlots("b", 3), HostSlots("c", 3))
    >>> [str(host) for host in take(hosts, Count(4))], [str(host) for host in take(hosts, Count(2, "hosts"))]
    (['a:3', 'b:1'], ['a:3', 'b:3'])
    """
    chosen: list[HostSlots] = []
    remaining = most.number
    for entry in ordered:
        if remaining <= 0:
            break
        chosen.append(replace(entry, slots=min(entry.slots, remaining)) if most.unit == "slots" else entry)
        remaining -= entry.slots if most.unit == "slots" else 1
    return tuple(chosen)


# --- from text ---

Implied = Callable[[Leaf], Sequence[str]]


def read_source(
    text: str, implied: Implied = lambda leaf: (), stale: str = "", clock: Clock = SYSTEM_CLOCK
) -> PolledSource:
    """Make the source that a text such as ``union(ec2:tag=job=7, file:spare.txt)`` describes.

    Args:
        text: Text of the expression.
        implied: Function from a source of the text to flags for it, which flags in the text override; see ``Flags``.
        stale: Value of ``--stale`` for each source without one of its own; empty for none.
        clock: Clock of the combinations.

    Raises:
        UsageError: The text is wrong; the message names the place, or the flag.
    """
    expression = parse_expression(text, frozenset(KINDS) - {"source"})
    words = (lambda leaf: (f"--stale={stale}", *implied(leaf))) if stale else implied
    if isinstance(expression, Leaf):
        return _ask_leaf(expression, words)
    return _ask(expression, words, clock)


def start_now(leaf: Leaf, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Flags that start a schedule or a trace without a given start now, and not with an older job.

    The time is rounded down, so that hosts of its second 0 are present at once.
    """
    is_given = any(word.name in ("start", "start-file") for word in leaf.words)
    return [] if leaf.kind not in ("schedule", "trace") or is_given else [f"--start={math.floor(clock.wall_s())}"]


def _ask_leaf(leaf: Leaf, implied: Implied) -> PolledSource:
    given = [f"--{word.name}={word.value}" if word.name else word.value for word in leaf.words]
    return make_source(leaf.kind, given, list(implied(leaf)))


def _ask(expression: Expression, implied: Implied, clock: Clock) -> PolledSource:
    match expression:
        case Leaf():
            try:
                return _ask_leaf(expression, implied)
            except UsageError as error:
                raise UsageError(f"{expression}: {error}") from error
        case UnionOf(parts):
            asked = [_ask(part, implied, clock) for part in parts]
            named = [
                RememberedSource(str(part), one.source, one.stale_s, clock)
                for part, one in zip(parts, asked, strict=True)
            ]
            return PolledSource(
                UnionSource(named),
                refresh_s=max(one.refresh_s for one in asked),
                stale_s=max(one.stale_s for one in asked),
                first_s=max(one.first_s for one in asked),
                needs_packages=any(one.needs_packages for one in asked),
                is_damped=any(one.is_damped for one in asked),
            )
        case Limit(part, most):
            one = _ask(part, implied, clock)
            return replace(one, source=Selection(one.source, most, f"limit(..., {most})", cheapest_first=False))
        case Prefer(part, most):
            # Some sources give prices only if they are asked for them.
            one = _ask(part, lambda leaf: ("--prices=yes", *implied(leaf)), clock)
            return replace(one, source=Selection(one.source, most, f"prefer(..., {most})", cheapest_first=True))


def sources_in(source: Source) -> Iterator[Source]:
    """The sources of a combination, recursively; a source that is no combination itself."""
    if not source.parts:
        yield source
    for part in source.parts:
        yield from sources_in(part)


FLAGS, BARE_FLAG = ("source", *REMOTE_FLAGS), "source"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_source``."""
    flags.needed("source", "source", "from_source 'union(ec2:tag=job=7, file:spare.txt)'")
    text = flags.text("source", "")
    try:
        asked = read_source(text, stale=flags.text("stale", ""))
    except UsageError as error:
        raise UsageError(f"--source {text!r}: {error}") from error
    return replace(
        asked,
        refresh_s=flags.seconds("refresh", asked.refresh_s),
        stale_s=flags.seconds("stale", asked.stale_s),
        first_s=flags.seconds("first", asked.first_s),
    )
