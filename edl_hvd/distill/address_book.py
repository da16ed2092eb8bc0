"""Which addresses a student calls, when again, and why there is no teacher at some. Knows neither sockets nor clocks.

One thread calls ``due`` and ``ended``; the rest is told from anywhere, under the owner's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from edl_hvd.distill.conversation import Address

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0
# Between two calls. A teacher that is back is found within a second.
_CALLS_PER_S = 50.0
# Of addresses without a teacher; a connection that is refused costs 0.1 ms.
_FAULT_PAUSE_S, _LONGEST_FAULT_PAUSE_S = 10.0, 160.0
# After what does not heal by itself, such as another token.


@dataclass(frozen=True)
class Fault:
    """Why there is no teacher at an address.

    Attributes:
        why: Reason in words.
        is_lasting: Whether it stays until a person changes something, such as a wrong token.
    """

    why: str
    is_lasting: bool = False


@dataclass
class AddressBook:
    """The addresses of teachers.

    Attributes:
        listed: Numeric address of each that the source lists.
        faults: Reason for each without a teacher.
    """

    listed: dict[Address, str] = field(default_factory=dict)
    faults: dict[Address, Fault] = field(default_factory=dict)
    _due_s: dict[Address, float] = field(default_factory=dict)
    _pauses_s: dict[Address, float] = field(default_factory=dict)

    def list(self, addresses: Mapping[Address, str]) -> None:
        """Call these from now on.

        Args:
            addresses: IPv4 or IPv6 address of each.
        """
        self.listed = dict(addresses)
        for gone in set(self.faults) - set(addresses):
            del self.faults[gone]

    def due(self, called: Collection[Address], now_s: float) -> dict[Address, str]:
        """The addresses to call now.

        Args:
            called: Those that have a connection.
            now_s: Now.
        """
        for gone in set(self._due_s) - set(self.listed) - set(called):
            del self._due_s[gone]
        return {
            address: numeric
            for address, numeric in self.listed.items()
            if address not in called and self._due_s.get(address, 0.0) <= now_s
        }

    def next_due_s(self, called: Collection[Address]) -> float | None:
        """When the next address is due; ``None`` if none is."""
        return min((self._due_s.get(one, 0.0) for one in self.listed if one not in called), default=None)

    def joined(self, address: Address) -> None:
        """There is a teacher at an address."""
        self.faults.pop(address, None)
        self._pauses_s.pop(address, None)

    def ended(self, address: Address, fault: Fault, missing: int, now_s: float) -> None:
        """A connection has ended.

        Args:
            address: Address of it.
            fault: Reason.
            missing: Number of addresses without a connection.
            now_s: Now.
        """
        if address in self.listed:
            self.faults[address] = fault
        self._due_s[address] = now_s + self._next_pause_s(address, fault.is_lasting, missing)

    def call_at_once(self, *addresses: Address) -> None:
        """Forget the pauses of some addresses, or of all."""
        for address in addresses or tuple(self._due_s):
            self._due_s[address] = 0.0

    def _next_pause_s(self, address: Address, is_lasting: bool, missing: int) -> float:
        first_s = _FAULT_PAUSE_S if is_lasting else _FIRST_PAUSE_S
        longest_s = _LONGEST_FAULT_PAUSE_S if is_lasting else max(_LONGEST_PAUSE_S, missing / _CALLS_PER_S)
        pause_s = self._pauses_s.get(address, first_s)
        self._pauses_s[address] = min(longest_s, 2 * pause_s)
        return max(first_s, min(longest_s, pause_s))
