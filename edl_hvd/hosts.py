"""Hosts and their slots, and the one text form of them that Horovod reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
    """

    host: str
    slots: int

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.host):
            raise UsageError(
                f"host name {self.host!r} is not usable; expected letters, digits, '.', '-' and '_' "
                "(IPv6 addresses cannot be written in Horovod's host:slots form; use a DNS name)"
            )
        if not 1 <= self.slots <= _MOST_SLOTS:
            raise UsageError(f"host {self.host!r} has {shown(self.slots)} slots; expected 1 to {_MOST_SLOTS}")
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
    ordered = sorted(hosts)
    twice = [name for name, times in Counter(entry.host for entry in ordered).items() if times > 1]
    if twice:
        raise UsageError(f"host {', '.join(twice)} is listed more than once; expected each host once")
    return "".join(f"{entry}\n" for entry in ordered)
