"""Which network interface of this host an address belongs to, and whether it has one."""

from __future__ import annotations

import socket

from edl_hvd.errors import PlatformError


def interface_of(address: str) -> str:
    """The network interface that has this address of ours.

    Raises:
        PlatformError: There is none.
    """
    import psutil  # not on hosts that only discover others

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise PlatformError(f"no network interface of this host has the address {address}; set --network-interfaces")


def require_address(interface: str) -> None:
    """Called before connections are made over this network interface.

    Raises:
        PlatformError: It has no IPv4 address here.
    """
    import psutil

    if not any(entry.family == socket.AF_INET for entry in psutil.net_if_addrs().get(interface, [])):
        names = ", ".join(psutil.net_if_addrs())
        raise PlatformError(
            f"network interface {interface!r} has no IPv4 address on this host, which has {names}; set "
            "--network-interfaces, or HOROVOD_GLOO_IFACE under mpirun"
        )
