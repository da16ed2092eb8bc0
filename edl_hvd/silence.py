"""Since when nothing has come from the system at the other end of a TCP connection."""

from __future__ import annotations

import socket
import struct

UNANSWERED_S = 3.0
# A host whose cable is pulled says nothing, not even that it is gone. A living one answers, whatever its processes do,
# so a host without an answer for this time is given up. The time is three times what a network needs to find another
# way (rapid spanning tree), and nearly all that a lost host costs the others.


def ask_for_answers(stream: socket.socket) -> None:
    """Have the system ask the other one every second whether it is there, when there is nothing else to answer."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), 1)


def unanswered_s(stream: socket.socket) -> float:
    """Seconds since anything came from the other system.

    It is 0 where ours does not tell (it is not Linux), and for a Unix socket, which has no other system.
    """
    if not hasattr(socket, "TCP_INFO") or stream.family == socket.AF_UNIX:
        return 0.0
    # tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds, see struct tcp_info in <linux/tcp.h>.
    data_ms, answer_ms = struct.unpack_from("II", stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60), 52)
    return float(min(data_ms, answer_ms)) / 1000
