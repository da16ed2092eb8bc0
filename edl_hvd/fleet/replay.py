"""Decides a fleet's history again, as :mod:`edl_hvd.driver.membership.history` does for one job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edl_hvd.fleet.events import FleetAction, FleetEvent
from edl_hvd.fleet.state import Fleet
from edl_hvd.fleet.store import FleetEntry
from edl_hvd.fleet.turn import turn


@dataclass(frozen=True)
class FleetDecision:
    """One event decided again.

    Attributes:
        at_s: Seconds on the fleet's clock.
        event: What happened.
        actions: What follows now.
        recorded: What followed then.
        fleet: The fleet after it.
    """

    at_s: float
    event: FleetEvent
    actions: tuple[FleetAction, ...]
    recorded: tuple[FleetAction, ...]
    fleet: Fleet

    @property
    def differs(self) -> bool:
        """Whether another version decided otherwise."""
        return self.actions != self.recorded


def decide_again(history: Iterable[FleetEntry]) -> Iterator[FleetDecision]:
    """Each event of a history through the decisions of today; nothing is started and nobody is told.

    It begins with the fleet before the oldest entry that is kept.
    """
    fleet = Fleet()
    for entry in history:
        fleet = entry.before or fleet
        fleet, actions = turn(fleet, entry.event, entry.at_s)
        yield FleetDecision(entry.at_s, entry.event, actions, entry.actions, fleet)
