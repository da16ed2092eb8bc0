"""Breaking one's own connections, so that bad news travels at once.

A Gloo worker that sees a peer die keeps its connections to the others open until it is shut down, and
they wait on them until the Gloo timeout (30 s by default). Ending the sockets at the first error turns
that into milliseconds, because each neighbour then fails and does the same. Linux only; elsewhere the
timeout applies.

At first only the reading side ends, so Gloo closes its connections without an error on the way, while
copies of the descriptors keep them open toward the peers. Gloo forgets a send that it was told to start
by what it has just read, and whose connection then fails (``Pair::signalException`` knows what is queued
only): whoever waits for it waits for the Gloo timeout. One recovery in six did when all members
broke connections with each other at the same moment.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"
# Who is told of the end by somebody else has ended its own side by then, on a busy machine too.
_HOLD_S = 0.2


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
    """Let those of the given sockets that are still open end, here at once and at the other end a moment later.

    Their owner keeps and closes them. Does not block.
    """
    held = []
    for descriptor, _ in sockets & open_sockets():
        with suppress(OSError):
            held.append(socket.socket(fileno=os.dup(descriptor)))
            held[-1].shutdown(socket.SHUT_RD)
    if held:
        ending = threading.Timer(_HOLD_S, _end, (held,))
        ending.daemon = True
        ending.start()


def _end(held: Iterable[socket.socket]) -> None:
    for copy in held:
        with copy, suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)
