"""The user's model, as a teacher computes with it."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edl_hvd.distill.outputs import Outputs, find_nan, named, to_arrays
from edl_hvd.errors import UsageError
from edl_hvd.frames import Array, ArrayType

_PROBE_SEED = 20240613


@dataclass(frozen=True)
class Teacher:
    """A model that answers.

    Attributes:
        call: Function of a tensor, or a dict of tensors, that returns one or the other.
        name: Name for people.
        fingerprint: Digest of the weights; empty where nothing is known of them.
        device: Device on which it computes.
    """

    call: Callable[[Any], Any]
    name: str
    fingerprint: str
    device: torch.device

    @classmethod
    def of(cls, built: Any, device: str = "cpu") -> Teacher:
        """A teacher of a module or a callable; a module is set to evaluation, its parameters need no gradient.

        Args:
            built: Module, or callable; a callable may have an attribute ``fingerprint``.
            device: Device as torch names it.

        Raises:
            UsageError: It is neither.
        """
        if isinstance(built, torch.nn.Module):
            module = built.to(device).eval().requires_grad_(False)
            return cls(module, type(built).__name__, digest_of(module), torch.device(device))
        if not callable(built):
            raise UsageError(f"the teacher is a {type(built).__name__}; expected a torch.nn.Module or a callable")
        name = getattr(built, "__name__", type(built).__name__)
        return cls(built, name, str(getattr(built, "fingerprint", "")), torch.device(device))

    def answer(self, send: Mapping[str, torch.Tensor], outputs: Outputs, padded_to: int = 0) -> tuple[Array, ...]:
        """The answer to a batch, on the CPU.

        Args:
            send: Inputs by name; one alone reaches the model as a tensor.
            outputs: What to return of it.
            padded_to: Number of samples to which the batch is filled up with zeros, whose answers are dropped.

        Raises:
            UsageError: The model does not return tensors, one row for each sample.
        """
        samples = len(next(iter(send.values())))
        with torch.inference_mode():
            inputs = {name: _pad(one.to(self.device), padded_to) for name, one in send.items()}
            result = self.call(next(iter(inputs.values())) if len(inputs) == 1 else inputs)
            try:
                tensors = named(result)
            except UsageError as error:
                raise UsageError(f"the teacher {self.name} returned what cannot travel: {error}") from error
            for name, one in tensors.items():
                if one.dim() < 1 or len(one) != max(samples, padded_to):
                    raise UsageError(
                        f"the teacher {self.name} returned {name!r} of shape {tuple(one.shape)} for "
                        f"{max(samples, padded_to)} samples; expected one row for each"
                    )
            return to_arrays(outputs.reduce({name: one[:samples] for name, one in tensors.items()}))

    def probe(self, send: tuple[ArrayType, ...], samples: int, outputs: Outputs, is_exact: bool) -> tuple[Array, ...]:
        """The answer to a fixed input of these types, which shows its own types, and its bits."""
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        inputs = {one.name: _fill(one, samples, generator) for one in send}
        return self.answer(inputs, outputs, samples if is_exact else 0)


def _pad(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    if len(tensor) >= samples:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(samples - len(tensor), *tensor.shape[1:])])


def _fill(one: ArrayType, samples: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, one.dtype)
    shape = (samples, *one.shape)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype)  # a number that any embedding has


def digest_of(module: torch.nn.Module) -> str:
    """A digest of a module's parameters and buffers, the same wherever they are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(to_arrays({name: tensor})[0].content)
    return digest.hexdigest()[:32]


def digest_answer(arrays: tuple[Array, ...]) -> str:
    """A digest of an answer's bits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.type).encode())
        digest.update(array.content)
    return digest.hexdigest()[:32]


def check_probe(arrays: tuple[Array, ...]) -> str:
    """Why a teacher that answers the probe so is none; empty if it is one."""
    return find_nan(arrays)


def load(text: str) -> Callable[[], Any]:
    """The function that ``file.py:build`` or ``package.module:build`` names.

    Raises:
        UsageError: There is none.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{text!r} names no function; expected FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise UsageError(f"cannot load {where!r} of {text!r}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        raise UsageError(f"{where!r} has no function {name!r}; expected one that returns the model")
    return build  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    sys.path.insert(0, str(path.resolve().parent))
    return importlib.import_module(path.stem)
