"""Breaking one's own connections, so that bad news travels at once.

A Gloo worker that sees a peer die keeps its connections to the others open until it is shut down, and
they wait on them until the Gloo timeout (30 s by default). Shutting the sockets down at the first
error turns that into milliseconds, because each neighbour then fails and does the same. Linux only;
elsewhere the timeout applies.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> frozenset[tuple[int, str]]:
    """The sockets this process has open now, as (descriptor, inode name).

    The inode is kept because a closed descriptor's number is given out again.
    """
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(FileNotFoundError):
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:"):
                    found.add((int(name), target))
    return frozenset(found)


def break_sockets(sockets: frozenset[tuple[int, str]]) -> None:
    """Shut down those of the given sockets that are still open; their owner keeps and closes them."""
    for descriptor, _ in sockets & open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
