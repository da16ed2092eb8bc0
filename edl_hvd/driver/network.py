"""How workers find the driver and each other, on hosts that have several addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edl_hvd.driver.local_hosts import is_local, own_addresses
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import PlatformError

_DISCARD_PORT = 9  # of no importance: a datagram socket that is connected sends nothing
_EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class Network:
    """How a worker that is about to be started will reach the driver.

    Attributes:
        toward: This machine's address as a host's workers reach it. Blocks; called in a thread. Raises ``EdlHvdError``.
        interface: Name that every host's network interface has, or ``None``: that which leads to the driver.
    """

    toward: Callable[[str], str]
    interface: str | None = None


@dataclass(frozen=True)
class Line:
    """A worker's connection to the driver, as the driver sees it.

    Attributes:
        there: The worker's address.
        here: The driver's address, at which this worker reaches it for sure.
    """

    there: str
    here: str


@dataclass(frozen=True)
class MeetingPlace:
    """Where the members of a world meet.

    Attributes:
        address: On which the driver serves their key-value store.
        callers: Addresses of the members; nobody else has any business there.
        facing: Address of this machine that members elsewhere reach; ``None`` if all are here.
        own: Addresses of this machine.
    """

    address: str
    callers: frozenset[str]
    facing: str | None
    own: frozenset[str]

    @classmethod
    def of(cls, lines: Mapping[str, Line]) -> MeetingPlace:
        """That of a world with these members."""
        callers = frozenset(line.there for line in lines.values())
        own = own_addresses() | {address for address in callers if address.startswith("127.")}
        ours = {line.here for line in lines.values()}
        address = ours.pop() if len(ours) == 1 else _EVERYWHERE
        facing = next((line.here for line in lines.values() if line.there not in own), None)
        return cls(address, callers, facing, own)

    def address_for(self, line: Line) -> str | None:
        """Which of its addresses this member is to meet the others at; ``None`` for that of its line to the driver.

        A worker on this machine may have come by way of 127.0.0.1, where no other host would find it.
        """
        return self.facing if line.there in self.own else None


def choose_network(interfaces: Sequence[str], ssh: Ssh, local: Callable[[str], bool] = is_local) -> Network:
    """How workers reach the driver: through the first of these interfaces, or whichever leads to their host.

    Raises:
        PlatformError: The interface does not exist here.
    """
    if interfaces:
        own = _address_of(interfaces[0])
        return Network(lambda host: own, interfaces[0])
    return Network(lambda host: "127.0.0.1" if local(host) else _address_toward(host, ssh))


def _address_toward(host: str, ssh: Ssh) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, _DISCARD_PORT))
            except socket.gaierror:
                probe.connect((ssh.real_name(host), _DISCARD_PORT))
            address: str = probe.getsockname()[0]
            return address
    except (OSError, UnicodeError) as error:  # the latter for a label that no domain name may have
        raise PlatformError(
            f"no way leads from here to host {host}: {error}; check its name and the network, or name an interface "
            "with --network-interfaces"
        ) from error


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    ask_address = 0x8915  # SIOCGIFADDR of netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, ask_address, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise PlatformError(
                f"network interface {interface!r} has no IPv4 address here: {error.strerror}; this host has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
