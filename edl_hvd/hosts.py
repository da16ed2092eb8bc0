"""Hosts and their slots, and the one text form of them that Horovod reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from edl_hvd.errors import UsageError

# A name that survives Horovod's own parsing: it splits at ':' and strips nothing else.
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_MOST_SLOTS = 100_000
# More than any host has processors; beyond it a number is a slip of the keyboard.
_SHOWN_CHARACTERS = 80
# Of a value in a message: a name has 63 at most.
_DIGITS = re.compile(r"0*([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class HostSlots:
    """A host and how many workers it may run.

    >>> HostSlots("Node-1", 4) == HostSlots("node-1", 4)
    True

    Attributes:
        host: DNS name or IPv4 address, reachable by ssh from the driver. Capitals become small letters: to DNS and to
            ssh both are one name, so two forms of it are one host.
        slots: Workers it may run, 1 to 100,000.
        devices: Numbers of the GPUs there that the workers may use, one for each slot, in the order of the slots; empty
            if nobody says it: then each worker chooses by its local rank.
    """

    host: str
    slots: int
    devices: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.host):
            raise UsageError(
                f"host name {shown(self.host)} is not usable; expected letters, digits, '.', '-' and '_' "
                "(IPv6 addresses cannot be written in Horovod's host:slots form; use a DNS name)"
            )
        if not 1 <= self.slots <= _MOST_SLOTS:
            raise UsageError(f"host {shown(self.host)} has {shown(self.slots)} slots; expected 1 to {_MOST_SLOTS}")
        if self.devices and (len(set(self.devices)) != self.slots or len(self.devices) != self.slots):
            raise UsageError(
                f"host {shown(self.host)} has {self.slots} slots and the devices {shown(list(self.devices))}; expected "
                "one number for each slot, each once, e.g. 'node-1 slots=2 devices=0,1'"
            )
        if (name := self.host.lower()) != self.host:
            object.__setattr__(self, "host", name)

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
    count = read_count(slots) if colon else default_slots
    if count is None:
        raise UsageError(
            f"host line {shown(text)} is not understood; expected 'host' or 'host:slots', e.g. 'node-1:4', with 1 to "
            f"{_MOST_SLOTS} slots"
        )
    return HostSlots(host, count)


def read_count(text: str) -> int | None:
    """Read a whole number of at most nine digits; ``None`` for any other text, other scripts' digits included.

    >>> read_count("0012"), read_count("12345678901"), read_count("\N{ARABIC-INDIC DIGIT FOUR}"), read_count("-1")
    (12, None, None, None)
    """
    digits = _DIGITS.fullmatch(text)
    return int(digits[1]) if digits else None


def shown(value: object) -> str:
    """A value as it stands in a message, cut where it is long.

    >>> shown("node-1:x"), shown("9" * 5000)
    ("'node-1:x'", "'999999999999999999999999999999999999999...")
    """
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS // 2]}..."


def format_hosts(hosts: Iterable[HostSlots]) -> str:
    """The answer of a discovery script: one ``host:slots`` line per host, sorted, newline-terminated.

    Raises:
        UsageError: A host is listed twice.
    """
    return "".join(f"{entry}\n" for entry in _each_once(hosts))


def format_hosts_file(hosts: Iterable[HostSlots]) -> str:
    """A hosts file: the same lines, and ``host slots=2 devices=0,1`` where devices are known.

    >>> print(format_hosts_file([HostSlots("a", 2, (2, 3)), HostSlots("b", 1)]), end="")
    a slots=2 devices=2,3
    b:1

    Raises:
        UsageError: A host is listed twice.
    """
    return "".join(f"{with_devices(entry)}\n" for entry in _each_once(hosts))


def with_devices(entry: HostSlots) -> str:
    """A host as a hosts file lists it."""
    return (
        f"{entry.host} slots={entry.slots} devices={','.join(map(str, entry.devices))}" if entry.devices else str(entry)
    )


def _each_once(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    ordered = sorted(hosts)
    twice = [name for name, times in Counter(entry.host for entry in ordered).items() if times > 1]
    if twice:
        raise UsageError(f"host {', '.join(twice)} is listed more than once; expected each host once")
    return ordered
