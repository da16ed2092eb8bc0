"""What a teacher sends back of what its model computes, and what the student's script gets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from edl_hvd.errors import UsageError
from edl_hvd.frames import ELEMENT_BYTES, Array, ArrayType

LOGITS, FLOAT16 = "logits", "float16"
_TOP_K = re.compile(r"top_k=([0-9]+)(?:,temperature=([0-9.]+))?")


class _TopKFields(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor
    rest: torch.Tensor


class TopK(_TopKFields):
    """The largest probabilities of a teacher, and the rest of the mass.

    Attributes:
        values: Log-probabilities of the k likeliest classes, at the temperature asked for; shape (samples, …, k).
        indices: Classes that they belong to; the same shape.
        rest: Log-probability of all other classes together; shape (samples, …). It is -inf if there are none.
        temperature: Temperature of the probabilities; ``None`` if it is not known, as in a tuple that the script made.
            It is no element of the tuple.
    """

    temperature: float | None = None


@dataclass(frozen=True)
class Outputs:
    """What travels back: all that the model returns, or the k likeliest classes.

    Attributes:
        k: Number of classes; 0 for everything.
        temperature: Temperature of their probabilities.
        is_half: Whether numbers travel, and are kept, as float16.
    """

    k: int = 0
    temperature: float = 1.0
    is_half: bool = False

    @classmethod
    def parse(cls, text: str) -> Outputs:
        """Read "logits", "float16", "top_k=10" or "top_k=10,temperature=2".

        Raises:
            UsageError: The text is none of these.
        """
        if text == LOGITS:
            return cls()
        if text == FLOAT16:
            return cls(is_half=True)
        match = _TOP_K.fullmatch(text)
        try:
            outputs = cls(int(match[1]), float(match[2] or 1.0)) if match else cls()
        except ValueError:
            outputs = cls()
        if outputs.k < 1 or not outputs.temperature > 0:
            raise UsageError(
                f"outputs={text!r} are not understood; expected 'logits' (all that the model returns), 'float16' (the "
                "same, rounded), 'top_k=10', or 'top_k=10,temperature=2'"
            )
        return outputs

    def reduce(self, answer: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What travels of an answer. On the teacher.

        Raises:
            UsageError: The model has several outputs, or fewer classes than k; or a number does not fit into float16.
        """
        if self.is_half:
            return {name: _half(name, one) for name, one in answer.items()}
        if not self.k:
            return dict(answer)
        if set(answer) != {LOGITS}:
            raise UsageError(f"top_k needs a model that returns one tensor of logits, this returns {sorted(answer)}")
        logits = answer[LOGITS].float()
        if logits.dim() < 2 or logits.shape[-1] < self.k:
            raise UsageError(f"top_k={self.k} needs at least {self.k} classes; the model's output has shape "
                             f"{tuple(logits.shape)}")  # fmt: skip
        return dict(zip(TopK._fields, top_k(logits, self.k, self.temperature), strict=True))

    def restore(self, answer: Mapping[str, torch.Tensor]) -> Any:
        """What the script gets: a tensor for one output, ``TopK``, or a dict by name.

        They are copies. The script may overwrite them; an answer comes again after a rollback, and is kept.
        """
        copies = {name: self._restored(name, one) for name, one in answer.items()}
        if self.k:
            return _at(self.temperature, TopK(**copies))
        return copies[LOGITS] if set(copies) == {LOGITS} else copies

    def _restored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if self.k and name == "indices":
            dtype = torch.int64
        elif self.is_half and tensor.is_floating_point():
            dtype = torch.float32
        return tensor.clone() if dtype == tensor.dtype else tensor.to(dtype)


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if bool((half.isinf() & ~tensor.isinf()).any()):
        raise UsageError(
            f"the model's output {name!r} holds {float(tensor[tensor.isfinite()].abs().max()):g}, more than float16 "
            "does (65504); expected outputs='logits', or a model that returns smaller numbers"
        )
    return half


def top_k(logits: torch.Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The k likeliest classes of logits, and the logarithm of the mass of all others."""
    log_probabilities = torch.log_softmax(logits / temperature, dim=-1)
    values, indices = log_probabilities.topk(k, dim=-1)
    others = log_probabilities.scatter(-1, indices, -torch.inf)
    return _at(temperature, TopK(values, indices.int(), torch.logsumexp(others, dim=-1)))


def _at(temperature: float, answer: TopK) -> TopK:
    answer.temperature = temperature
    return answer


def named(value: Any) -> dict[str, torch.Tensor]:
    """A tensor, or a mapping of names to tensors, as a dict; a tensor's name is "logits".

    Raises:
        UsageError: It is something else.
    """
    if isinstance(value, torch.Tensor):
        return {LOGITS: value}
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in value.items())
    ):
        return dict(value)
    raise UsageError(f"{describe(value)} is neither a tensor nor a dict of tensors")


def describe(value: Any) -> str:
    """What something is, for a message."""
    if isinstance(value, Mapping):
        return "a dict of " + (", ".join(sorted({type(one).__name__ for one in value.values()})) or "nothing")
    return f"a {type(value).__name__}"


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[Array, ...]:
    """The arrays of tensors; they share the memory of those that are contiguous on the CPU.

    Raises:
        UsageError: An element type cannot travel.
    """
    arrays = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ELEMENT_BYTES:
            raise UsageError(f"{name!r} is a tensor of {dtype}; expected one of {', '.join(ELEMENT_BYTES)}")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "sparse"
            raise UsageError(f"{name!r} is a {kind} tensor; expected a dense tensor, such as that of to_dense()")
        there = tensor.detach().cpu().contiguous()
        arrays.append(Array(ArrayType(name, dtype, tuple(there.shape)), _content_of(there)))
    return tuple(arrays)


def _content_of(tensor: torch.Tensor) -> bytes | memoryview:
    if not tensor.numel():
        return b""
    known = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy does not have that type
    return memoryview(known.numpy()).cast("B")  # type: ignore[arg-type]


def to_tensors(arrays: tuple[Array, ...]) -> dict[str, torch.Tensor]:
    """The tensors of arrays, which share their memory."""
    tensors = {}
    for array in arrays:
        dtype = getattr(torch, array.type.dtype)
        flat = torch.frombuffer(array.content, dtype=dtype) if len(array.content) else torch.empty(0, dtype=dtype)
        tensors[array.type.name] = flat.view(array.type.shape)
    return tensors


def row_types(arrays: tuple[Array, ...]) -> tuple[ArrayType, ...]:
    """The types of one sample of arrays whose first dimension is the batch."""
    return tuple(ArrayType(one.type.name, one.type.dtype, one.type.shape[1:]) for one in arrays)


def find_nan(arrays: tuple[Array, ...]) -> str:
    """Why an answer is none, or an empty text: -inf is a probability of 0, NaN is none.

    The largest number of an array with NaN is NaN, and takes a tenth of the time of a mask.
    """
    for array in arrays:
        name, dtype = array.type.name, array.type.dtype
        if not array.type.size_bytes or "float" not in dtype:
            continue
        # numpy takes less to begin; torch is faster with half numbers.
        is_half = dtype in ("float16", "bfloat16")
        if math.isnan(to_tensors((array,))[name].max() if is_half else numpy.frombuffer(array.content, dtype).max()):
            return f"its answer {name!r} holds NaN"
    return ""
