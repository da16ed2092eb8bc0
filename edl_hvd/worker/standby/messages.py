"""What a donor sends to a standby: named tensors and plain values, as frames."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from edl_hvd.errors import ProtocolError
from edl_hvd.frames import Array, ArrayType, Frame, Limits
from edl_hvd.json_values import show
from edl_hvd.worker.trace import TensorTrace

# The header has the plain state of a job: attributes, and the names of its tensors. What does not fit into the memory
# of this host is no state.
LIMITS = Limits(
    header_bytes=64 << 20, body_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), arrays=1 << 20
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class StateMessage:
    """One message of a donor.

    Attributes:
        what: "state", "step", "commit" or "end".
        plain: JSON part of the message.
        tensors: Tensors by name, of any shape, type and device; received ones are on the CPU.
        trace: What the tensors were when the message was made, if something may write to them until it is sent.
    """

    what: str
    plain: Any = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    trace: TensorTrace | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode(message: StateMessage) -> Frame:
    """The frame of a message; it shares the memory of tensors that are contiguous on the CPU."""
    types = [[_dtype_name(tensor), list(tensor.shape)] for tensor in message.tensors.values()]
    arrays = tuple(_to_bytes(name, tensor) for name, tensor in message.tensors.items())
    return Frame(message.what, {"plain": message.plain, "types": types}, arrays)


def decode(frame: Frame) -> StateMessage:
    """The message that a frame holds; its tensors share the frame's memory.

    Raises:
        ProtocolError: It holds none.
    """
    try:
        types = frame.fields["types"]
        tensors = {
            array.type.name: _from_bytes(array, dtype, shape)
            for array, (dtype, shape) in zip(frame.arrays, types, strict=True)
        }
        return StateMessage(frame.what, frame.fields["plain"], tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"a message {show(frame.what)} of a donor holds no state: {error}") from error


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _to_bytes(name: str, tensor: torch.Tensor) -> Array:
    there = tensor.detach().cpu().contiguous()
    content = memoryview(there.view(-1).view(torch.uint8).numpy()) if there.numel() else b""  # type: ignore[arg-type]
    return Array(ArrayType(name, "uint8", (there.nbytes,)), content)


def _from_bytes(array: Array, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = _DTYPES[dtype]
    flat = torch.frombuffer(array.content, dtype=kind) if len(array.content) else torch.empty(0, dtype=kind)
    return flat.view(shape)
