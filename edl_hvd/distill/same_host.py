"""Unix sockets between a student and a teacher of the same host, whose bytes pass no network protocol.

A teacher at ``address:port`` listens on a Unix socket of that name, too; the name is no file and ends with its process
(an abstract socket, which Linux has). Anybody on the host may take a name, so both sides prove the token on it as they
do on TCP, and a student that cannot use one calls over TCP. Large bodies pass through shared memory, see
``body_slots.py``.
"""

from __future__ import annotations

import socket
import sys

_SEND_BYTES = 1 << 21
# A body of megabytes passes in few pieces then, each of which wakes both sides; the system may allow less.
_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def _name(host: str, port: int) -> str:
    # With another name, versions that do not know shared memory for bodies meet over TCP.
    return f"\0edl_hvd/teacher/2/{host}:{port}"


def family_of(numeric: str) -> socket.AddressFamily:
    """The family of a numeric address."""
    return socket.AF_INET6 if ":" in numeric else socket.AF_INET


def listen(listener: socket.socket) -> socket.socket | None:
    """The Unix socket beside a TCP socket that listens; ``None`` if there is none here, or the name is taken."""
    if sys.platform != "linux":
        return None
    host, port = listener.getsockname()[:2]
    beside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        beside.bind(_name(host, port))
        beside.listen(1024)
    except OSError:
        beside.close()
        return None
    beside.setblocking(False)
    return beside


def connect(numeric: str, port: int) -> socket.socket | None:
    """A connection to the teacher at an address of this host; ``None`` if it is another host's, or there is none.

    It does not block.
    """
    if sys.platform != "linux" or not is_own(numeric):
        return None
    for host in (numeric, _ANY[family_of(numeric)]):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        if connection.connect_ex(_name(host, port)) == 0:
            widen(connection)
            return connection
        connection.close()
    return None


def widen(connection: socket.socket) -> None:
    """Let more bytes be under way on a Unix socket than a system has by default (208 KiB)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)


def is_own(numeric: str) -> bool:
    """Whether an address is one of this host, as this process sees its network; nothing is sent."""
    if numeric.startswith("127."):
        return True
    with socket.socket(family_of(numeric), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((numeric, 9))
        except OSError:
            return False
        # A system that talks to itself does so from the same address.
        return bool(probe.getsockname()[0] == numeric)
