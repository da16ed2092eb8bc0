"""Without a driver: the members of a world find out by themselves that they wait for each other in different calls.

Each that has waited for a minute reports what it waits for to the key-value store of its world, and reads the reports
of the others. When all are there, and the same at two looks, each member comes to the same verdict. Horovod's own stall
inspector does not help: it never runs over Gloo.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from edl_hvd import key_value_store
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.deadlock import Waiting, describe_deadlock, describe_standstill, is_deadlock
from edl_hvd.errors import UsageError
from edl_hvd.key_value_store import StoreAddress
from edl_hvd.worker.progress import progress
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
# Withdrawing a report takes a millisecond, so one that is there at two looks stands.
_STORE_TIMEOUT_S = 2.0
# A member that asks the store does not look at its collective; the store is in the memory of rank 0.
_AGREE_S = 5.0
# Ten looks. The first to raise the error ends the waits of the others, who must not take that for a death.
_POLL_S = 0.01


@dataclass(frozen=True)
class StallInspector:
    """The reports of one world's members about collectives that they wait for.

    Attributes:
        world: World that is inspected.
        store: Address of its key-value store.
        timeout_s: Seconds that all may wait for each other.
        clock: Clock of this worker.
    """

    world: World
    store: StoreAddress
    timeout_s: float
    clock: Clock = SYSTEM_CLOCK

    def put(self, what: str, value: bytes) -> None:
        """Put the value of this rank into the store."""
        key_value_store.put(self.store, f"/edl_hvd.{what}/{self.world.rank}", value, _STORE_TIMEOUT_S)

    def get_all(self, what: str) -> list[bytes] | None:
        """The values of all ranks, in rank order; ``None`` if one is not there."""
        found = []
        for rank in range(self.world.size):
            value = key_value_store.get(self.store, f"/edl_hvd.{what}/{rank}", _STORE_TIMEOUT_S)
            if not value:
                return None
            found.append(value)
        return found


class StalledCollective:
    """One collective that this worker has waited for longer than the timeout.

    Args:
        inspector: Inspector of its world.
        collective: Name of the collective.
        started: Number of times that each collective was started, by name.
    """

    def __init__(self, inspector: StallInspector, collective: str, started: Mapping[str, int]) -> None:
        self._inspector = inspector
        self._collective = collective
        self._started = started
        self._began_s = inspector.clock.monotonic_s()
        self._look_s = self._began_s
        self._before: list[bytes] | None = None
        self._published = self._has_warned = False

    def look(self) -> None:
        """Compare the reports of all members, now and then; called while this worker waits.

        Raises:
            UsageError: All wait for each other in different collectives. Every member raises it.
        """
        now_s = self._inspector.clock.monotonic_s()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_EVERY_S
        try:
            workers = self._read_stalled()
            deadlocked = is_deadlock(workers)
            if deadlocked:
                self._await_verdict()
        except (OSError, HTTPException):
            return  # the store is gone, and rank 0 with it: that is found out elsewhere
        lasted_s = self._inspector.timeout_s + now_s - self._began_s
        if deadlocked:
            raise UsageError(describe_deadlock(workers, lasted_s))
        if workers and not self._has_warned:
            self._has_warned = True
            if self._inspector.world.rank == 0:
                logger.warning("%s", describe_standstill(workers, lasted_s, progress.step))

    def end(self) -> None:
        """Withdraw the report of this worker: its wait is over."""
        if self._published:
            with suppress(OSError, HTTPException):
                self._inspector.put("waits", b"")

    def _read_stalled(self) -> list[Waiting]:
        """The collective of each member; empty unless all have waited for the same ones at two looks."""
        if not self._published:
            self._published = True
            self._inspector.put("waits", self._report())
        reports = self._inspector.get_all("waits")
        is_same = reports is not None and reports == self._before
        self._before = reports
        return self._parse(reports) if reports is not None and is_same else []

    def _report(self) -> bytes:
        place = progress.where().place
        # Names of a large model's parameters would be too long for the store.
        started = {_digest(name): count for name, count in dict(self._started).items()}
        # The number makes it another one than that of an earlier wait.
        number = secrets.randbits(62)
        report = {"number": number, "collective": self._collective, "started": started, "place": place}
        return json.dumps(report).encode()

    def _parse(self, reports: list[bytes]) -> list[Waiting]:
        parsed: list[dict[str, Any]] = [json.loads(report) for report in reports]
        names = {each["collective"] for each in parsed}
        members = self._inspector.world.members
        return [
            Waiting(rank, members[rank], each["collective"],
                    {name: each["started"].get(_digest(name), 0) for name in names}, each["place"])
            for rank, each in enumerate(parsed)
        ]  # fmt: skip

    def _await_verdict(self) -> None:
        """Wait until all members have come to the verdict, at most for a few seconds."""
        clock = self._inspector.clock
        self._inspector.put("deadlock", b"1")
        until_s = clock.monotonic_s() + _AGREE_S
        with suppress(OSError, HTTPException):  # rank 0 has gone: it knew of all others
            while self._inspector.get_all("deadlock") is None and clock.monotonic_s() < until_s:
                clock.sleep(_POLL_S)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=6).hexdigest()
