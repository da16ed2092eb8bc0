"""Hosts that hold a lease: each one writes an object again and again; one whose object stays as it is is gone.

    URL/HOST=SLOTS.lease      {"holder": "5f1c…", "count": 17}

``leasing.py`` writes it. No clocks are compared: a lease is over when its object has not changed for ``lapse_s``
seconds of the reader's own monotonic clock, over several looks that all succeeded. When a reader starts, it cannot
tell a lease that lives from one that a dead host has left, so its first answer waits until each one has changed once,
or has lapsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.source import Answer, Permission, Source
from edl_hvd.errors import DiscoveryError, ObjectMissingError, StorageError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.storage import Storage, open_storage

LAPSE_S = 10.0
_LEAST_LOOKS = 3
# A look that comes late, as after a pause of this process, counts as a third of the time at most.
_FIRST_LOOKS_EVERY_S = 0.5
_LARGEST_BYTES = 4096
_READERS = 8
_KEY = re.compile(r"(.+)=([0-9]{1,6})\.lease")


def key_of(entry: HostSlots) -> str:
    """The key of a host's lease.

    >>> key_of(HostSlots("node-7", 2))
    'node-7=2.lease'
    """
    return f"{entry.host}={entry.slots}.lease"


def parse_key(key: str) -> HostSlots:
    """The host of a lease.

    Raises:
        UsageError: The key is none of a lease.
    """
    match = _KEY.fullmatch(key)
    if not match:
        raise UsageError(f"{key!r} is no lease; expected HOST=SLOTS.lease, as 'edl-hvd lease' writes it")
    return HostSlots(match[1], int(match[2]))


@dataclass(frozen=True)
class HostLease:
    """A lease as it was seen last.

    Attributes:
        content: Its bytes, as text.
        written_s: When the storage says that it was written; only compared with itself.
        is_held: Whether it counts; ``None`` until it has changed for the first time.
        silent_s: Seconds of looking without a change.
    """

    content: str
    written_s: float | None
    is_held: bool | None
    silent_s: float = 0.0

    def moved(self, content: str, written_s: float | None) -> HostLease:
        """The lease after a change."""
        return HostLease(content, written_s, is_held=True)

    def still(self, passed_s: float, lapse_s: float) -> HostLease:
        """The lease after a look that saw no change.

        >>> lease = HostLease("{}", None, is_held=True).still(60.0, lapse_s=9.0)
        >>> lease.silent_s, lease.still(2.0, 9.0).still(4.0, 9.0).is_held
        (3.0, True)
        >>> lease.still(9.0, 9.0).still(9.0, 9.0).is_held
        False
        """
        silent_s = self.silent_s + min(passed_s, lapse_s / _LEAST_LOOKS)
        return replace(self, silent_s=silent_s, is_held=False if silent_s >= lapse_s else self.is_held)


class Leases(Source):
    """The hosts with a lease at a storage URL.

    A lease that appears while this source watches counts at once; those of the first look count when they have
    changed. A failure of the storage begins all times anew, because leases cannot be written meanwhile either.

    Args:
        url: Folder, ``s3://bucket/prefix``, or another URL of a storage.
        lapse_s: Seconds without a change after which a lease is over.
        clock: Clock of the lapses.
    """

    def __init__(self, url: str, lapse_s: float = LAPSE_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url, self._lapse_s, self._clock = url, lapse_s, clock
        self._storage: Storage | None = None
        self._leases: dict[str, HostLease] | None = None
        self._looked_s = 0.0
        self._is_closed = False

    def answer(self) -> Answer:
        known = self._look()
        while not self._is_closed and any(lease.is_held is None for lease in known.values()):
            self._clock.sleep(_FIRST_LOOKS_EVERY_S)
            known = self._look()
        held: dict[str, HostSlots] = {}
        left_out = {}
        for key, lease in known.items():
            entry = parse_key(key)
            if not lease.is_held:
                left_out[entry.host] = f"its lease has not changed for {self._lapse_s:g} s"
            elif entry.host not in held or held[entry.host].slots < entry.slots:
                held[entry.host] = entry
        return Answer(tuple(held.values()), left_out={host: why for host, why in left_out.items() if host not in held})

    def _look(self) -> Mapping[str, HostLease]:
        """All leases as they are now."""
        try:
            now = self._read_all(self._leases or {})
        except (StorageError, UsageError) as error:
            if self._leases is not None:
                self._leases = {key: replace(lease, silent_s=0.0) for key, lease in self._leases.items()}
            self._looked_s = self._clock.monotonic_s()
            if isinstance(error, UsageError):
                raise DiscoveryError(f"leases at {self._url!r}: {error}") from error
            raise DiscoveryError(str(error)) from error
        self._leases, self._looked_s = now, self._clock.monotonic_s()
        return now

    def _read_all(self, before: Mapping[str, HostLease]) -> dict[str, HostLease]:
        if self._storage is None:
            self._storage = open_storage(self._url)
        storage, is_first = self._storage, self._leases is None
        listed = {one.key: one for one in storage.list()}
        for key in listed:
            parse_key(key)
        if not listed and not storage.place_exists():
            raise DiscoveryError(f"there is nothing at {storage.url}; expected leases: start 'edl-hvd lease' on a host")
        passed_s = self._clock.monotonic_s() - self._looked_s
        # What the listing shows as written since needs no look at its content.
        rewritten = {
            key for key, one in listed.items() if key in before and one.written_s not in (None, before[key].written_s)
        }
        leases = {key: before[key].moved(before[key].content, listed[key].written_s) for key in rewritten}
        others = sorted(set(listed) - rewritten)
        with ThreadPoolExecutor(max(1, min(_READERS, len(others)))) as readers:
            contents = list(readers.map(lambda key: _read(storage, key), others))
        if None in contents:
            self._check_given_back({key for key, content in zip(others, contents, strict=True) if content is None})
        for key, content in zip(others, contents, strict=True):
            written_s = listed[key].written_s
            if content is None:
                continue  # given back since it was listed
            if key not in before:
                leases[key] = HostLease(content, written_s, is_held=None if is_first else True)
            elif content != before[key].content:
                leases[key] = before[key].moved(content, written_s)
            else:
                leases[key] = before[key].still(passed_s, self._lapse_s)
        return leases

    def _check_given_back(self, missing: set[str]) -> None:
        """Leases that were listed and could not be read are given back only if they are listed no more.

        Otherwise a folder that is unmounted between the two would end every lease.

        Raises:
            DiscoveryError: They are still listed, or the place is gone.
        """
        assert self._storage is not None
        listed = {one.key for one in self._storage.list()}
        if still := sorted(missing & listed):
            raise DiscoveryError(f"{still[0]!r} at {self._storage.url} is listed, but cannot be read")
        if not listed and not self._storage.place_exists():
            raise DiscoveryError(f"there is nothing at {self._storage.url} any more; expected leases")

    def permissions(self) -> list[Permission]:
        try:
            self._read_all({})
        except (DiscoveryError, StorageError, UsageError) as error:
            return [Permission(f"list and read {self._url}", False, " ".join(str(error).split()))]
        return [Permission(f"list and read {self._url}", True, "granted")]

    def memory(self, now_s: float) -> object:
        """See ``Source``."""
        if self._leases is None:
            return None
        kept = {key: [one.content, one.written_s, one.is_held, one.silent_s] for key, one in self._leases.items()}
        return {"leases": kept, "age_s": now_s - self._looked_s}

    def recall(self, memory: object, now_s: float) -> None:
        """See ``Source``."""
        if self._leases is not None or not isinstance(memory, dict):
            return  # what this process has seen is newer
        try:
            self._leases = {
                str(key): HostLease(str(content), written_s, is_held, float(silent_s))
                for key, (content, written_s, is_held, silent_s) in memory["leases"].items()
            }
            self._looked_s = now_s - float(memory["age_s"])
        except (AttributeError, KeyError, TypeError, ValueError):
            self._leases = None  # of another version

    def close(self) -> None:
        """See ``Source``."""
        self._is_closed = True


def _read(storage: Storage, key: str) -> str | None:
    """The content of a lease; ``None`` if it is gone.

    Raises:
        UsageError: It is none.
    """
    try:
        content = storage.read(key, _LARGEST_BYTES)
    except ObjectMissingError:
        return None
    try:
        found = json.loads(content)
        if not isinstance(found["holder"], str) or type(found["count"]) is not int:
            raise TypeError("a holder and a count are expected")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{key!r} holds {content[:80]!r}, which is no lease: {error}") from error
    return content.decode()


FLAGS, BARE_FLAG = ("url", "lapse", "refresh", "stale", "first"), "url"


def from_flags(flags: Flags) -> PolledSource:
    """The source ``leases:``."""
    flags.needed("url", "storage URL", "leases:s3://bucket/job-7/hosts")
    url, lapse_s = flags.text("url", ""), flags.seconds("lapse", LAPSE_S)
    if not lapse_s:
        raise UsageError(
            "--lapse 0 would end every lease; expected e.g. '10', at least four times 'edl-hvd lease --every'"
        )
    is_folder = "://" not in url or url.startswith("file://")
    if is_folder:
        open_storage(url)  # for its error; others need packages, which a poll has not
    return PolledSource(
        Leases(url, lapse_s),
        refresh_s=flags.seconds("refresh", 2),
        stale_s=flags.seconds("stale", 300),
        # A lease that a dead host has left is told from the others by then.
        first_s=flags.seconds("first", max(20.0, lapse_s + 10)),
        needs_packages=not is_folder,
        is_damped=True,
    )
