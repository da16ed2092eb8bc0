"""A synthetic spot market, and the trace of a fleet on it.

An autoscaler wants a number of hosts. The model:

- **Life of a host**: Weibull, by default of shape 0.8, so young hosts are the most likely to go. Kadupitiya, Jadhao
  and Sharma, "Modeling the temporally constrained preemptions of transient cloud VMs" (HPDC 2020), measured that on
  Google Cloud, where lives end after a day at the latest (here they need not).
- **Shortages**: in each zone as a Poisson process. Each host of the zone goes at that moment with the same
  probability, and none comes to the zone until the shortage is over, after an exponential time. Thorpe et al. recorded
  that many hosts go at once, mostly of one zone: "Bamboo: Making Preemptible Instances Resilient for
  Affordable Training of Large DNNs" (NSDI 2023). Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep
  Learning Models" (EuroSys 2022), trained on such fleets, too.
- **A missing host** is replaced after an exponential time, in a zone without a shortage. The first fleet is present
  at the beginning.
- **The price** of an hour: its logarithm is an AR(1) process with normal noise and a step per hour, which is about as
  slow as prices of EC2 since 2017.

One generator of the standard library and inverted distribution functions give the same trace for a seed on every
version of Python.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field, fields

from edl_hvd.errors import UsageError
from edl_hvd.traces.trace import HostChange, Trace

_HOUR_S = 3600.0
_PRICE_MEMORY, _PRICE_UNREST = 0.95, 0.03
# An hour's price keeps 95 % of its distance to the mean and moves by 3 %: by some ten percent within a day or two.


@dataclass(frozen=True)
class Market:
    """Parameters of a market.

    With the defaults a fleet shrinks to a third in its worst hour, as in Bamboo's trace of p3.

    Attributes:
        hosts: Number of hosts that the autoscaler wants.
        hours: Length of the trace in hours.
        zones: Number of zones over which the hosts are spread.
        life_h: Mean life in hours of a host that no shortage ends. The hosts of Bamboo's trace of p3 lived for 1.5 h.
        life_shape: Shape of the Weibull distribution of lives; 1 is exponential, below it young hosts go first.
        shortages_per_day: Mean number of shortages in each zone.
        shortage_share: Probability that a shortage takes a host of its zone.
        shortage_min: Mean minutes for which a shortage lasts.
        wait_min: Mean minutes until a missing host is replaced.
        price_usd_per_h: Mean price; 0 for a trace without prices.

    Raises:
        UsageError: A parameter is out of its range.
    """

    hosts: int = 64
    hours: float = 24.0
    zones: int = 3
    life_h: float = 8.0
    life_shape: float = 0.8
    shortages_per_day: float = 5.0
    shortage_share: float = 0.6
    shortage_min: float = 60.0
    wait_min: float = 40.0
    price_usd_per_h: float = 0.0

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            least = 1 if name in ("hosts", "zones") else 0
            may_be_least = name in ("hosts", "zones", "shortages_per_day", "shortage_share", "price_usd_per_h")
            if not (least < value < math.inf or (may_be_least and value == least)):
                bound = f"at least {least}" if may_be_least else f"more than {least}"
                raise UsageError(f"{name} of a market is {value}; expected a number, {bound}")
        if self.shortage_share > 1:
            raise UsageError(f"shortage_share of a market is {self.shortage_share}; expected a probability, 0 to 1")


def generate(market: Market, seed: int) -> Trace:
    """Make the trace of a fleet on a market; a seed gives one trace. Times are whole seconds."""
    return _Fleet(market, random.Random(seed)).live()


@dataclass
class _Fleet:
    """Hosts over time. ``events`` is a heap of moment, number, kind, and host or zone."""

    market: Market
    chance: random.Random
    events: list[tuple[float, int, str, str]] = field(default_factory=list)
    zone_of: dict[str, int] = field(default_factory=dict)
    short_until_s: dict[int, float] = field(default_factory=dict)
    changes: dict[float, tuple[list[str], list[str]]] = field(default_factory=dict)
    prices: dict[float, float] = field(default_factory=dict)
    made: int = 0
    planned: int = 0

    def live(self) -> Trace:
        end_s = round(self.market.hours * _HOUR_S)
        for _ in range(self.market.hosts):
            self._arrive(0.0)
        for zone in range(self.market.zones):
            self._plan_shortage(0.0, zone)
        if self.market.price_usd_per_h:
            self._draw_prices(end_s)
        while self.events and self.events[0][0] < end_s:
            now_s, _, what, whom = heapq.heappop(self.events)
            if what == "end" and whom in self.zone_of:
                self._leave(now_s, whom)
            elif what == "arrive":
                self._arrive(now_s)
            elif what == "short":
                self._run_short(now_s, int(whom))
        moments = sorted({*self.changes, *self.prices, float(end_s)})
        return Trace(tuple(self._change(moment_s) for moment_s in moments))

    def _change(self, moment_s: float) -> HostChange:
        added, removed = self.changes.get(moment_s, ([], []))
        return HostChange(moment_s, tuple(added), tuple(removed), self.prices.get(moment_s))

    def _plan(self, at_s: float, what: str, whom: str = "") -> None:
        """Plan an event at a whole second after the present one; an event in infinite time never comes."""
        self.planned += 1
        moment_s = float(math.ceil(at_s)) if math.isfinite(at_s) else math.inf
        heapq.heappush(self.events, (moment_s, self.planned, what, whom))

    def _arrive(self, now_s: float) -> None:
        zones = [zone for zone in range(self.market.zones) if self.short_until_s.get(zone, 0.0) <= now_s]
        if not zones:
            self._plan(min(self.short_until_s.values()) + self._exponential(self.market.wait_min * 60), "arrive")
            return
        self.made += 1
        host = f"node{self.made}"
        self.zone_of[host] = zones[int(self.chance.random() * len(zones))]
        self.changes.setdefault(now_s, ([], []))[0].append(host)
        self._plan(now_s + self._weibull(self.market.life_h * _HOUR_S, self.market.life_shape), "end", host)

    def _leave(self, now_s: float, host: str) -> None:
        del self.zone_of[host]
        self.changes.setdefault(now_s, ([], []))[1].append(host)
        self._plan(now_s + self._exponential(self.market.wait_min * 60), "arrive")

    def _plan_shortage(self, now_s: float, zone: int) -> None:
        if self.market.shortages_per_day:
            self._plan(now_s + self._exponential(24 * _HOUR_S / self.market.shortages_per_day), "short", str(zone))

    def _run_short(self, now_s: float, zone: int) -> None:
        self.short_until_s[zone] = now_s + self._exponential(self.market.shortage_min * 60)
        # Not hosts that have come in this second: a trace has no host that comes and goes at once.
        new = self.changes.get(now_s, ([], []))[0]
        there = [host for host, its_zone in self.zone_of.items() if its_zone == zone and host not in new]
        for host in there:
            if self.chance.random() < self.market.shortage_share:
                self._leave(now_s, host)
        self._plan_shortage(now_s, zone)

    def _draw_prices(self, end_s: float) -> None:
        distance = 0.0
        for hour in range(math.ceil(end_s / _HOUR_S)):
            self.prices[hour * _HOUR_S] = round(self.market.price_usd_per_h * math.exp(distance), 4)
            distance = _PRICE_MEMORY * distance + _PRICE_UNREST * self._gauss()

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.chance.random()) or 1.0

    def _weibull(self, mean: float, shape: float) -> float:
        scale = mean / math.gamma(1.0 + 1.0 / shape)
        return scale * (-math.log(1.0 - self.chance.random())) ** (1.0 / shape) or 1.0

    def _gauss(self) -> float:
        """A normal random number (Box and Muller 1958)."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.chance.random()))
        return radius * math.cos(2.0 * math.pi * self.chance.random())
