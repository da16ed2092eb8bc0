"""Messages with tensors over a connection: one JSON line that says what follows, then the tensors' bytes.

Nothing is pickled; what arrives can only become numbers, strings and tensors.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from edl_hvd.errors import RendezvousError

_LONGEST_HEADER_BYTES = 64 << 20  # the plain state of a job: attributes, and the names of its tensors


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        what: Kind of the message.
        plain: JSON part of the message.
        tensors: Tensors, any shape and type; received ones are on the CPU.
    """

    what: str
    plain: Any = None
    tensors: Sequence[torch.Tensor] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def send(connection: socket.socket, frame: Frame) -> None:
    """Write a frame; its tensors may be on any device. Blocks.

    Raises:
        OSError: The other side is gone.
    """
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in frame.tensors]
    header = json.dumps({"what": frame.what, "plain": frame.plain, "tensors": shapes})
    connection.sendall(header.encode() + b"\n")
    for tensor in frame.tensors:
        if tensor.numel():
            connection.sendall(_bytes_of(tensor.detach().cpu().contiguous()))


def receive(connection: BinaryIO) -> Frame | None:
    """The next frame; ``None`` if the connection has ended. Blocks.

    Raises:
        RendezvousError: What came is no frame.
    """
    line = connection.readline(_LONGEST_HEADER_BYTES)
    if not line.endswith(b"\n"):
        return None
    try:
        header = json.loads(line)
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in header["tensors"]]
        frame = Frame(header["what"], header["plain"], tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise RendezvousError(f"the donor of this standby sent something unreadable: {error}") from error
    for tensor in tensors:
        rest = _bytes_of(tensor)
        while rest:
            count = connection.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                return None
            rest = rest[count:]
    return frame


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
