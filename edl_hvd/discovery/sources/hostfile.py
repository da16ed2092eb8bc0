"""Hosts that are named once and for all: the list of ``-H`` and the hostfiles of Horovod and MPI.

``static_file.py`` reads a file again and again while others write it, and therefore refuses what may be half a
line. Here is read, once, what people and batch systems have written before the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots, parse_host

_MOST_SLOTS = re.compile(r"\smax[-_]slots\s*=\s*[0-9]+")
# Open MPI's bound for more workers than slots, which there never are here.
_SLOTS = re.compile(r"\s+slots\s*=\s*")


@dataclass(frozen=True)
class FixedHosts(Source):
    """A source whose answer never changes."""

    listed: tuple[HostSlots, ...]

    def answer(self) -> Answer:
        return Answer(self.listed)


def parse_host_list(text: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Read ``host:slots,host:slots``; a host that is named twice has the slots of both, as under MPI.

    >>> parse_host_list("node-1:4,node-2:2")
    (HostSlots(host='node-1', slots=4), HostSlots(host='node-2', slots=2))

    Raises:
        UsageError: One line per entry that is not understood.
    """
    return _add_up((("", entry) for entry in text.split(",")), default_slots)


def read_hostfile(path: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Read a file of ``host``, ``host:4`` or ``host slots=4 max-slots=8`` lines; ``#`` starts a comment.

    A host on several lines has the slots of all: batch systems write one line per slot.

    Raises:
        UsageError: The file cannot be read or lists no host; or one line for each of its lines that is not understood.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}; expected lines such as 'node-1 slots=4'") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it is no text file ({error.reason}); expected lines such as 'node-1 slots=4'") from error
    entries = [(f"line {number}: ", line.partition("#")[0].strip()) for number, line in enumerate(lines, start=1)]
    named = [(place, _SLOTS.sub(":", _MOST_SLOTS.sub("", entry))) for place, entry in entries if entry]
    if not named:
        raise UsageError("it lists no host; expected a line such as 'node-1 slots=4'")
    return _add_up(named, default_slots)


def _add_up(entries: Iterable[tuple[str, str]], default_slots: int) -> tuple[HostSlots, ...]:
    """The hosts of ``(place, text)`` entries, in the order of their first mention."""
    slots: dict[str, int] = {}
    problems: list[str] = []
    for place, text in entries:
        try:
            host = parse_host(text, default_slots)
            slots[host.host] = slots.get(host.host, 0) + host.slots
        except UsageError as error:
            problems.append(f"{place}{error}")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(HostSlots(host, count) for host, count in slots.items())
