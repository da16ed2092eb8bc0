"""Which network interface of this host an address belongs to."""

from __future__ import annotations

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
