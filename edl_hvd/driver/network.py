"""How workers find the driver and each other, on hosts that have several addresses; which hosts are this machine."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import PlatformError

_DISCARD_PORT = 9  # of no importance: a datagram socket that is connected sends nothing
_EVERYWHERE = "0.0.0.0"
_LIST_ADDRESSES = 0x8912
# SIOCGIFCONF of netdevice(7). It lists every IPv4 address of every interface, secondary ones too.
_ENTRY = struct.Struct("16sLLHBBB0L")
# struct ifreq: the interface's name, then a union whose largest member is struct ifmap.
_ADDRESS = slice(20, 24)
# In it a struct sockaddr_in: two bytes of family and two of port come before the address.


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
class Connection:
    """A worker's connection to the driver, as the driver sees it.

    Attributes:
        peer: The worker's address.
        local: The driver's address, at which this worker reaches it for sure.
    """

    peer: str
    local: str


@dataclass(frozen=True)
class RendezvousEndpoint:
    """Where the members of a world meet.

    Attributes:
        address: On which the driver serves their key-value store.
        allowed_peers: Addresses of the members; nobody else has any business there.
        external_address: Address of this machine that members elsewhere reach; ``None`` if all are here.
        own_addresses: Addresses of this machine.
    """

    address: str
    allowed_peers: frozenset[str]
    external_address: str | None
    own_addresses: frozenset[str]

    @classmethod
    def of(cls, connections: Mapping[str, Connection]) -> RendezvousEndpoint:
        """That of a world with these members."""
        allowed_peers = frozenset(connection.peer for connection in connections.values())
        own = own_addresses() | {address for address in allowed_peers if address.startswith("127.")}
        ours = {connection.local for connection in connections.values()}
        address = ours.pop() if len(ours) == 1 else _EVERYWHERE
        external_address = next(
            (connection.local for connection in connections.values() if connection.peer not in own), None
        )
        return cls(address, allowed_peers, external_address, own)

    def address_for(self, connection: Connection) -> str | None:
        """The address at which this member is to meet the others; ``None``: the one of its connection to the driver.

        A worker on this machine may have come by way of 127.0.0.1, where no other host would find it.
        """
        return self.external_address if connection.peer in self.own_addresses else None


def is_local(host: str) -> bool:
    """Whether workers on ``host`` are started without ssh, by Horovod's rule.

    A host is local when its IPv4 address belongs to an interface of this machine: 127.0.0.1 does, 127.0.0.2 reaches
    the same machine but does not. One case is added: Debian gives a machine's own name the address 127.0.1.1.
    A name without an address is not local; ssh will say what is wrong with it. Blocks while the name is looked up.
    """
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # The latter for a label that no domain name may have.
        return False
    return address in own_addresses() or (address.startswith("127.") and host == socket.gethostname())


def own_addresses() -> frozenset[str]:
    """The IPv4 addresses of this machine's interfaces.

    Binding a socket would not tell: Linux lets one bind to all of 127.0.0.0/8, and to any address where
    ``ip_nonlocal_bind`` is set. psutil would, but a machine that only runs the driver need not have it.
    """
    size_bytes = 64 * _ENTRY.size
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        while True:
            entries = ctypes.create_string_buffer(size_bytes)
            request = struct.pack("iL", size_bytes, ctypes.addressof(entries))
            used_bytes = struct.unpack("iL", fcntl.ioctl(asking, _LIST_ADDRESSES, request))[0]
            # The kernel fills what it is given and does not say that there was more.
            if used_bytes + _ENTRY.size <= size_bytes:
                break
            size_bytes *= 2
    found = (entries.raw[start : start + _ENTRY.size] for start in range(0, used_bytes, _ENTRY.size))
    return frozenset(socket.inet_ntoa(entry[_ADDRESS]) for entry in found)


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
