"""Hosts and their slots, and the one text form of them that Horovod reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edl_hvd.errors import UsageError

# A name that survives Horovod's own parsing: it splits at ':' and strips nothing else.
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, order=True)
class HostSlots:
    """A host and how many workers it may run.

    Attributes:
        host: DNS name or IPv4 address, reachable by ssh from the driver.
        slots: Workers it may run, at least 1.
    """

    host: str
    slots: int

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.host):
            raise UsageError(
                f"host name {self.host!r} is not usable; expected letters, digits, '.', '-' and '_' "
                "(IPv6 addresses cannot be written in Horovod's host:slots form; use a DNS name)"
            )
        if self.slots < 1:
            raise UsageError(f"host {self.host!r} has {self.slots} slots; expected at least 1")

    def __str__(self) -> str:
        return f"{self.host}:{self.slots}"


def parse_host(text: str, default_slots: int = 1) -> HostSlots:
    """Read ``host`` or ``host:slots``.

    >>> parse_host("10.0.0.7:4")
    HostSlots(host='10.0.0.7', slots=4)

    Raises:
        UsageError: The text is neither form.
    """
    host, colon, slots = text.strip().partition(":")
    if colon and not slots.isdecimal():
        raise UsageError(f"host line {text!r} is not understood; expected 'host' or 'host:slots', e.g. 'node-1:4'")
    return HostSlots(host, int(slots) if colon else default_slots)


def format_hosts(hosts: Iterable[HostSlots]) -> str:
    """The answer of a discovery script: one ``host:slots`` line per host, sorted, newline-terminated.

    Raises:
        UsageError: A host is listed twice.
    """
    ordered = sorted(hosts)
    names = [entry.host for entry in ordered]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"host {', '.join(twice)} is listed more than once; expected each host once")
    return "".join(f"{entry}\n" for entry in ordered)
