"""Which hosts are this machine, so that their workers need no ssh."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

_LIST_ADDRESSES = 0x8912
# SIOCGIFCONF of netdevice(7). It lists every IPv4 address of every interface, secondary ones too.
_ENTRY = struct.Struct("16sLLHBBB0L")
# struct ifreq: the interface's name, then a union whose largest member is struct ifmap.
_ADDRESS = slice(20, 24)
# In it a struct sockaddr_in: two bytes of family and two of port come before the address.


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
