"""Which network interface of this host an address belongs to, and whether it has one."""

from __future__ import annotations

import socket

from edl_hvd.errors import PlatformError

_REMEDY = "set --network-interfaces, or HOROVOD_GLOO_IFACE under mpirun"


def interface_of(address: str) -> str:
    """The network interface that has this address of ours.

    Raises:
        PlatformError: There is none.
    """
    import psutil  # not on hosts that only discover others

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise PlatformError(f"no network interface of this host has the address {address}; {_REMEDY}")


def address_of(interface: str) -> str:
    """The first IPv4 address that this network interface has here.

    Raises:
        PlatformError: It has none.
    """
    import psutil

    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    names = ", ".join(psutil.net_if_addrs())
    raise PlatformError(
        f"network interface {interface!r} has no IPv4 address on this host, which has {names}; {_REMEDY}"
    )
