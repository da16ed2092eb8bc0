"""Without a driver: the members of a world find out by themselves that they wait for each other in different calls.

Each that has waited for a minute puts what it waits for into the key-value store of its world, and reads what the
others have put there. When all have, and it is the same at two looks, each comes to the same verdict. Horovod's own
stall check cannot be asked for it: over Gloo it is never made.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
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
# While it is asked nobody looks after the wait; it is in the memory of rank 0.
_AGREE_S = 5.0
# Ten looks. Who raises the error first ends the waits of the others, who have to know better than that a member died.
_POLL_S = 0.01


class Standstills:
    """The standstills of one world: all its members wait for each other.

    Args:
        world: World that is watched.
        store: Its key-value store.
        timeout_s: How long all may wait for each other.
        clock: Tells the time.
        get: Reads from the store.
        put: Writes to it.
    """

    def __init__(
        self,
        world: World,
        store: StoreAddress,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
        get: Callable[[StoreAddress, str, float], bytes | None] = key_value_store.get,
        put: Callable[[StoreAddress, str, bytes, float], None] = key_value_store.put,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.clock = clock
        self._store = store
        self._get, self._put = get, put
        self._reports = 0

    def number(self) -> int:
        """The number of the next report, so that no two of this worker are the same."""
        self._reports += 1
        return self._reports

    def put(self, what: str, value: bytes) -> None:
        self._put(self._store, f"/edl_hvd.{what}/{self.world.rank}", value, _STORE_TIMEOUT_S)

    def get_all(self, what: str) -> list[bytes] | None:
        """What each rank has put there; ``None`` if one has not."""
        found = []
        for rank in range(self.world.size):
            value = self._get(self._store, f"/edl_hvd.{what}/{rank}", _STORE_TIMEOUT_S)
            if not value:
                return None
            found.append(value)
        return found


class LongWait:
    """One wait for a collective, which has lasted for the timeout.

    Args:
        standstills: Of its world.
        collective: Its name.
        started: How often each collective was started, by name.
    """

    def __init__(self, standstills: Standstills, collective: str, started: Mapping[str, int]) -> None:
        self._of = standstills
        self._collective = collective
        self._started = started
        self._began_s = standstills.clock.monotonic_s()
        self._look_s = self._began_s
        self._before: list[bytes] | None = None
        self._published = self._told = False

    def look(self) -> None:
        """See how it stands; called every moment.

        Raises:
            UsageError: All wait for each other in different collectives. Every member raises it.
        """
        now_s = self._of.clock.monotonic_s()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_EVERY_S
        try:
            workers = self._look()
            deadlocked = is_deadlock(workers)
            if deadlocked:
                self._agree()
        except (OSError, HTTPException):
            return  # the store is gone, and rank 0 with it: that is found out elsewhere
        lasted_s = self._of.timeout_s + now_s - self._began_s
        if deadlocked:
            raise UsageError(describe_deadlock(workers, lasted_s))
        if workers and not self._told:
            self._told = True
            if self._of.world.rank == 0:
                logger.warning("%s", describe_standstill(workers, lasted_s, progress.step))

    def end(self) -> None:
        """The wait is over."""
        if self._published:
            with suppress(OSError, HTTPException):
                self._of.put("waits", b"")

    def _look(self) -> list[Waiting]:
        """Where all wait; empty unless all do."""
        if not self._published:
            self._published = True
            self._of.put("waits", self._report())
        reports = self._of.get_all("waits")
        stand = reports is not None and reports == self._before
        self._before = reports
        return self._understand(reports) if reports is not None and stand else []

    def _report(self) -> bytes:
        place, _ = progress.where()
        # Names of a large model's parameters would be too long for the store.
        started = {_digest(name): count for name, count in dict(self._started).items()}
        report = {"number": self._of.number(), "collective": self._collective, "started": started, "place": place}
        return json.dumps(report).encode()

    def _understand(self, reports: list[bytes]) -> list[Waiting]:
        said: list[dict[str, Any]] = [json.loads(report) for report in reports]
        names = {each["collective"] for each in said}
        members = self._of.world.members
        return [
            Waiting(rank, members[rank], each["collective"],
                    {name: each["started"].get(_digest(name), 0) for name in names}, each["place"])
            for rank, each in enumerate(said)
        ]  # fmt: skip

    def _agree(self) -> None:
        """Wait until all have come to the verdict, or would have."""
        clock = self._of.clock
        self._of.put("deadlock", b"1")
        until_s = clock.monotonic_s() + _AGREE_S
        with suppress(OSError, HTTPException):  # rank 0 has gone: it knew of all others
            while self._of.get_all("deadlock") is None and clock.monotonic_s() < until_s:
                clock.sleep(_POLL_S)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=6).hexdigest()
