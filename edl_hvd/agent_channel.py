"""The connection through which a worker is started on a host with an agent, and the driver's end of it.

Toward the host go the bytes of a standard input. Back come frames: a letter, a length as four bytes, and the content:
bytes of standard output (``o``), of standard error (``e``) or, at the end, the exit code as text (``x``).

The driver runs this file as a program, which takes the place of ssh: its standard streams are those of the supervisor
on the host, and it ends with its exit code. It imports nothing but the standard library, as it is started for each
worker:

    python -I -S agent_channel.py DESCRIPTOR
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys

OUTPUT, ERROR, EXIT = b"o", b"e", b"x"
HEADER = struct.Struct(">cI")
LARGEST_FRAME_BYTES = 1 << 20
LOST = 255
# As ssh ends when it loses its host.
_READ_BYTES = 1 << 16


def send_frame(channel: socket.socket, kind: bytes, content: bytes) -> None:
    """Send one frame. Blocks.

    Raises:
        OSError: The connection is broken.
    """
    channel.sendall(HEADER.pack(kind, len(content)) + content)


def take_frames(received: bytearray) -> list[tuple[bytes, bytes]]:
    """Take the whole frames from what was received, and leave the rest.

    >>> received = bytearray(HEADER.pack(OUTPUT, 2) + b"hi" + b"x")
    >>> take_frames(received), received
    ([(b'o', b'hi')], bytearray(b'x'))

    Raises:
        ValueError: It holds no frame.
    """
    frames = []
    while len(received) >= HEADER.size:
        kind, size = HEADER.unpack_from(received)
        if kind not in (OUTPUT, ERROR, EXIT) or size > LARGEST_FRAME_BYTES:
            raise ValueError(f"{bytes(received[: HEADER.size])!r} begins no frame")
        if len(received) < HEADER.size + size:
            break
        frames.append((kind, bytes(received[HEADER.size : HEADER.size + size])))
        del received[: HEADER.size + size]
    return frames


def relay(channel: socket.socket) -> int:
    """Pass the standard streams of this process on, both ways. Blocks until the host says the end, or is lost.

    Returns:
        The exit code that the host told, or ``LOST``.
    """
    received = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(channel, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd == 0:
                    data = os.read(0, _READ_BYTES)
                    if data:
                        channel.sendall(data)
                    else:  # the driver is gone; the supervisor learns it from the end of its input
                        ready.unregister(0)
                        channel.shutdown(socket.SHUT_WR)
                    continue
                data = channel.recv(_READ_BYTES)
                if not data:
                    return LOST
                received += data
                for kind, content in take_frames(received):
                    if kind == EXIT:
                        return int(content)
                    _write(1 if kind == OUTPUT else 2, content)


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    try:
        code = relay(socket.socket(fileno=int(sys.argv[1])))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\r\n")
        code = LOST
    sys.exit(code)
