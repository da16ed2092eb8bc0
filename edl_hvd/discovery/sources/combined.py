"""Combinations of sources: all of them, at most so many, the cheapest first. See ``expression.py`` for their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.expression import Count, Expression, Leaf, Limit, Prefer, Union, parse_expression
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.kinds import KINDS, read_question
from edl_hvd.discovery.question import REMOTE_FLAGS, Question
from edl_hvd.discovery.source import (
    Bridging,
    Closable,
    HostDetails,
    Permission,
    Remembering,
    Source,
    details_of,
    left_out_of,
    notices_of,
    permissions_of,
)
from edl_hvd.discovery.sources.part import Part
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

CHEAPER = 0.8
# A host in use is traded for one that costs less than this part of its price: spot prices of one type differ by less
# from zone to zone and day to day, and a trade costs every worker a change of the world.


class UnionSource:
    """The hosts of all parts. Of a host that several have, the first part's slots count.

    A part that fails is stood in for by its last good answer, for its own ``stale_s``; then all of it fails, because
    a lost host is worse than an old one. The same once for a part that says that it has no hosts any more.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple[Source, ...]:
        return tuple(part.source for part in self._parts)

    def hosts(self) -> tuple[HostSlots, ...]:
        for part in self._parts:
            part.start()
        found: dict[str, HostSlots] = {}
        for part in self._parts:
            for entry in part.answer():
                found.setdefault(entry.host, entry)
        return tuple(found.values())

    def notices(self) -> Mapping[str, float]:
        """The soonest end of each host that a part knows."""
        soonest: dict[str, float] = {}
        for part in self._parts:
            for host, seconds in notices_of(part.source).items():
                soonest[host] = min(seconds, soonest.get(host, math.inf))
        return soonest

    def details(self) -> Mapping[str, HostDetails]:
        return {host: one for part in reversed(self._parts) for host, one in details_of(part.source).items()}

    def left_out(self) -> Mapping[str, str]:
        return {name: why for part in self._parts for name, why in left_out_of(part.source).items()}

    def bridged(self) -> tuple[float, str]:
        ages = [part.bridged() for part in self._parts]
        return max(age_s for age_s, _ in ages), "; ".join(why for _, why in ages if why)

    def permissions(self) -> Iterable[Permission]:
        for part in self._parts:
            yield from permissions_of(part.source)

    def memory(self, now_s: float) -> object:
        return {part.name: part.memory(now_s) for part in self._parts}

    def recall(self, memory: object, now_s: float) -> None:
        for part in self._parts:
            part.recall(memory.get(part.name) if isinstance(memory, dict) else None, now_s)

    def close(self) -> None:
        for part in self._parts:
            if isinstance(part.source, Closable):
                part.source.close()


class Selection:
    """At most ``most`` of a source's hosts: those that it gave before first, or the cheapest first.

    Args:
        name: Stands in the reason why a host is left out.
        cheapest_first: By the price for each slot; a host in use only makes way for one below ``CHEAPER`` of its
            price, and one without a known price comes last.
    """

    def __init__(self, source: Source, most: Count, name: str, cheapest_first: bool) -> None:
        self._source = source
        self._most = most
        self._name = name
        self._cheapest_first = cheapest_first
        self._in_use: frozenset[str] = frozenset()
        self._left_out: dict[str, str] = {}

    @property
    def parts(self) -> tuple[Source, ...]:
        return (self._source,)

    def hosts(self) -> tuple[HostSlots, ...]:
        found = self._source.hosts()
        prices = price_of_slots(found, details_of(self._source)) if self._cheapest_first else {}
        ordered = in_order(found, prices, self._in_use) if self._cheapest_first else in_use_first(found, self._in_use)
        chosen = take(ordered, self._most)
        self._in_use = frozenset(entry.host for entry in chosen)
        self._left_out = {
            entry.host: self._reason(prices.get(entry.host)) for entry in found if entry.host not in self._in_use
        }
        return chosen

    def _reason(self, price_usd: float | None) -> str:
        full = f"{self._name} has its {self._most.number} {self._most.unit}"
        if not self._cheapest_first:
            return full
        return f"{full}; its price is not known" if price_usd is None else f"{full} from cheaper hosts"

    def notices(self) -> Mapping[str, float]:
        return {host: seconds for host, seconds in notices_of(self._source).items() if host not in self._left_out}

    def details(self) -> Mapping[str, HostDetails]:
        return {host: one for host, one in details_of(self._source).items() if host in self._in_use}

    def left_out(self) -> Mapping[str, str]:
        return {**left_out_of(self._source), **self._left_out}

    def bridged(self) -> tuple[float, str]:
        return self._source.bridged() if isinstance(self._source, Bridging) else (0.0, "")

    def permissions(self) -> Iterable[Permission]:
        return permissions_of(self._source)

    def memory(self, now_s: float) -> object:
        inner = self._source.memory(now_s) if isinstance(self._source, Remembering) else None
        return {"in use": sorted(self._in_use), "source": inner}

    def recall(self, memory: object, now_s: float) -> None:
        known = memory if isinstance(memory, dict) else {}
        in_use = known.get("in use")
        self._in_use = frozenset(map(str, in_use)) if isinstance(in_use, list) else frozenset()
        if isinstance(self._source, Remembering):
            self._source.recall(known.get("source"), now_s)

    def close(self) -> None:
        if isinstance(self._source, Closable):
            self._source.close()


# --- which hosts: pure ---


def price_of_slots(found: Iterable[HostSlots], details: Mapping[str, HostDetails]) -> dict[str, float]:
    """What one slot of each host costs in an hour, as far as that is known."""
    prices = {entry.host: details[entry.host].price_usd_per_h for entry in found if entry.host in details}
    slots = {entry.host: entry.slots for entry in found}
    return {host: price / slots[host] for host, price in prices.items() if price is not None}


def in_order(found: Iterable[HostSlots], prices: Mapping[str, float], in_use: frozenset[str]) -> tuple[HostSlots, ...]:
    """The cheapest first; what is in use counts for less than it costs.

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
    """Then by name, so that every machine that asks makes the same choice."""
    return tuple(sorted(found, key=lambda entry: (entry.host not in in_use, entry.host)))


def take(ordered: Iterable[HostSlots], most: Count) -> tuple[HostSlots, ...]:
    """The first of them, up to the count; the last one with fewer slots than it has, where that makes it exact.

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
) -> Question:
    """The question that a text such as ``union(ec2:tag=job=7, file:spare.txt)`` describes.

    Args:
        implied: Words of flags for a source that are not in the text, and give way to it; see ``Flags``.
        stale: Value of a flag ``--stale`` for every source that has none of its own; empty for none.

    Raises:
        UsageError: Naming the place in the text, or the flag.
    """
    expression = parse_expression(text, frozenset(KINDS) - {"source"})
    words = (lambda leaf: (f"--stale={stale}", *implied(leaf))) if stale else implied
    if isinstance(expression, Leaf):
        return _ask_leaf(expression, words)
    return _ask(expression, words, clock)


def start_now(leaf: Leaf, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Words for a plan or a trace whose start is not given: it begins with who asks, not with an older job.

    Rounded down: what it has at 0 is there at once.
    """
    is_given = any(word.name in ("start", "start-file") for word in leaf.words)
    return [] if leaf.kind not in ("schedule", "trace") or is_given else [f"--start={math.floor(clock.wall_s())}"]


def _ask_leaf(leaf: Leaf, implied: Implied) -> Question:
    given = [f"--{word.name}={word.value}" if word.name else word.value for word in leaf.words]
    return read_question(leaf.kind, given, list(implied(leaf)))


def _ask(expression: Expression, implied: Implied, clock: Clock) -> Question:
    match expression:
        case Leaf():
            try:
                return _ask_leaf(expression, implied)
            except UsageError as error:
                raise UsageError(f"{expression}: {error}") from error
        case Union(parts):
            asked = [_ask(part, implied, clock) for part in parts]
            named = [Part(str(part), one.source, one.stale_s, clock) for part, one in zip(parts, asked, strict=True)]
            return Question(
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
            # A source that knows prices only when it is asked for them is asked.
            one = _ask(part, lambda leaf: ("--prices=yes", *implied(leaf)), clock)
            return replace(one, source=Selection(one.source, most, f"prefer(..., {most})", cheapest_first=True))


def sources_in(source: Source) -> Iterator[Source]:
    """Every source that a combination is made of; of any other itself."""
    if isinstance(source, UnionSource | Selection):
        for part in source.parts:
            yield from sources_in(part)
    else:
        yield source


FLAGS, BARE_FLAG = ("source", *REMOTE_FLAGS), "source"


def question(flags: Flags) -> Question:
    """What ``from_source`` asks."""
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
