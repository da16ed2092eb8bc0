"""How long steps took, by how their batch was divided: what a job measures, keeps, and shares with jobs of its family.

Jobs of one family are alike: whoever runs many jobs gives each new one what earlier ones have measured, in a variable
of its environment (``settings.family_timings``).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from edl_hvd.errors import UsageError
from edl_hvd.hosts import shown

Plan = TypeVar("Plan")
SHARED_TIMINGS = 32
"""Timings of a family that a new job is given, at most."""
_LARGEST, _LONGEST_S = 1_000_000_000, 1e6


@dataclass(frozen=True)
class Timing:
    """What was measured of one batch plan.

    Attributes:
        size: Workers, W.
        micro_batch: Samples per micro-batch, m.
        accumulation_steps: Micro-batches per worker and step, a.
        step_s: Seconds per optimizer step.
        windows: From how many spans of steps that was taken.
        hosts: Hosts that the workers were on.
    """

    size: int
    micro_batch: int
    accumulation_steps: int
    step_s: float
    windows: int = 1
    hosts: int = 1

    @property
    def plan(self) -> tuple[int, int, int, int]:
        """The arguments of :meth:`ThroughputModel.step_s`."""
        return self.size, self.micro_batch, self.accumulation_steps, self.hosts

    @property
    def is_usable(self) -> bool:
        """Whether each number is one that can have been measured."""
        counts = (self.size, self.micro_batch, self.accumulation_steps, self.windows, self.hosts)
        whole = all(isinstance(count, int) and 1 <= count <= _LARGEST for count in counts)
        return whole and isinstance(self.step_s, (int, float)) and 0 < self.step_s <= _LONGEST_S

    def as_list(self) -> list[float]:
        return [self.size, self.micro_batch, self.accumulation_steps, self.step_s, self.windows, self.hosts]


def with_timing(timings: Sequence[Timing], new: Timing) -> tuple[Timing, ...]:
    """The timings with one more; of a plan known already the geometric mean, the later ones weighing more.

    >>> with_timing([Timing(2, 8, 1, 1.0)], Timing(2, 8, 1, 4.0))
    (Timing(size=2, micro_batch=8, accumulation_steps=1, step_s=2.0, windows=2, hosts=1),)
    """
    known = next((timing for timing in timings if timing.plan == new.plan), None)
    if known is None:
        return (*timings, new)
    share = max(1 / (known.windows + 1), 0.25)  # hosts and data change: what was measured long ago fades
    step_s = known.step_s ** (1 - share) * new.step_s**share
    merged = replace(known, step_s=step_s, windows=known.windows + 1)
    return tuple(merged if timing is known else timing for timing in timings)


def varied(plans: Sequence[Plan], world_of: Callable[[Plan], Hashable], most: int) -> list[Plan]:
    """At most ``most`` of these, in their order. Of the world that has most the oldest goes first.

    To know many worlds says more than to know one well.

    >>> varied([(1, 8), (1, 16), (2, 8), (1, 32)], lambda plan: plan[0], most=2)
    [(2, 8), (1, 32)]

    Args:
        plans: From the oldest to the newest.
        world_of: In which world one was measured.
        most: How many to keep.
    """
    by_world: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for place, plan in enumerate(plans):
        by_world[world_of(plan)].append(place)
    left = len(plans)
    while left > most:
        max(by_world.values(), key=lambda places: (len(places), -places[0] if places else 0)).popleft()
        left -= 1
    return [plans[place] for place in sorted(place for places in by_world.values() for place in places)]


def pooled(timings: Iterable[Timing], most: int = SHARED_TIMINGS) -> tuple[Timing, ...]:
    """What several jobs have measured, as one, cut by :func:`varied`. Of a plan, the last measurement counts.

    >>> one, other = Timing(1, 8, 1, 0.1), Timing(2, 8, 1, 0.2)
    >>> [timing.step_s for timing in pooled([one, other, Timing(1, 8, 1, 0.3)])]
    [0.2, 0.3]

    Args:
        timings: From the oldest to the newest.
        most: How many to keep.
    """
    last: dict[tuple[int, int, int, int], Timing] = {}
    for timing in timings:
        last.pop(timing.plan, None)
        last[timing.plan] = timing
    return tuple(varied(tuple(last.values()), lambda timing: (timing.size, timing.hosts), most))


def timings_text(timings: Sequence[Timing]) -> str:
    """The text that :func:`read_timings` reads; empty for none."""
    return json.dumps([timing.as_list() for timing in timings]) if timings else ""


def read_timings(text: str) -> tuple[Timing, ...]:
    """Read timings from a variable of the environment.

    >>> read_timings("[[2, 8, 4, 0.4, 1, 1]]")
    (Timing(size=2, micro_batch=8, accumulation_steps=4, step_s=0.4, windows=1, hosts=1),)

    Raises:
        UsageError: They are none.
    """
    if not text.strip():
        return ()
    try:
        found = tuple(Timing(*row) for row in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        found = None
    if found is None or not all(timing.is_usable for timing in found):
        raise UsageError(
            f"{shown(text)} are no timings of steps; expected rows of workers, micro-batch, micro-batches per step, "
            "seconds per step, spans and hosts, e.g. [[2, 8, 4, 0.4, 1, 1]]"
        )
    return found
