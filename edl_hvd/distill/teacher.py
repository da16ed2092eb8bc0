"""The user's model, as a teacher computes with it."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edl_hvd.distill.outputs import Outputs, find_nan, named, row_types, to_arrays, to_tensors
from edl_hvd.errors import UsageError
from edl_hvd.frames import Array, ArrayType

_PROBE_SEED = 20240613
_PIXEL_DIMENSIONS = 3
# Of a sample of uint8: images have channels, height and width; what has fewer dimensions may be letters or tokens.
_REPEATS = 4
# Dropout over a few numbers gives the same answer twice now and then, hardly five times.
_LARGEST_CHANGE = 0.1
# Of the largest number of an answer. Quantization to 8 bits by the range of a batch changes it by some hundredths.


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
    def of(cls, built: Any, device: str = "") -> Teacher:
        """A teacher of a module or a callable; a module is set to evaluation, its parameters need no gradient.

        Args:
            built: Module, or callable; a callable may have an attribute ``fingerprint``.
            device: Device as torch names it; left out, that of the module's parameters, and the CPU for a callable.

        Raises:
            UsageError: It is neither.
        """
        if isinstance(built, torch.nn.Module):
            there = torch.device(device) if device else device_of(built)
            module = built.to(there).eval().requires_grad_(False)
            return cls(module, type(built).__name__, digest_of(module), there)
        if not callable(built):
            raise UsageError(f"the teacher is a {type(built).__name__}; expected a torch.nn.Module or a callable")
        name = getattr(built, "__name__", type(built).__name__)
        return cls(built, name, str(getattr(built, "fingerprint", "")), torch.device(device or "cpu"))

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

    def probe(
        self, send: tuple[ArrayType, ...], micro_batch: int, outputs: Outputs, is_exact: bool
    ) -> tuple[Array, ...]:
        """The answer to a fixed input of these types, which shows its own types, and its bits.

        Args:
            send: Types of the inputs, per sample.
            micro_batch: Largest number of samples in a micro-batch.
            outputs: What to return of the model's answer.
            is_exact: Whether micro-batches are computed in one shape.

        Raises:
            UsageError: The model fails on it, or its answer is no function of the sample alone.
        """
        samples = micro_batch if is_exact else min(2, micro_batch)
        padded_to = samples if is_exact else 0
        problem: UsageError | None = None
        # A mask of zeros, or a length of 0, leaves nothing to compute with.
        for number in (0, 1):
            inputs = _fixed_input(send, samples, number)
            try:
                answer = self._answer_or_problem(inputs, outputs, padded_to)
                break
            except UsageError as error:
                problem = problem or error
        else:
            assert problem is not None
            raise problem
        for _ in range(_REPEATS):
            again = self._answer_or_problem(_fixed_input(send, samples, number), outputs, padded_to)
            if digest_answer(answer) != digest_answer(again):
                raise UsageError(
                    f"the model {self.name} is no teacher: it answers the same input in two ways; is dropout on, or is "
                    "it a function of chance?"
                )
        others = {name: _with_other_samples(one) for name, one in _fixed_input(send, samples, number).items()}
        if not _is_about_equal(answer, self._answer_or_problem(others, outputs, padded_to)):
            raise UsageError(
                f"the model {self.name} is no teacher: its answer to a sample depends on the other samples of its "
                "batch, which are not the same at every teacher; is a BatchNorm in training, or without running "
                "statistics?"
            )
        return answer

    def _answer_or_problem(
        self, inputs: Mapping[str, torch.Tensor], outputs: Outputs, padded_to: int
    ) -> tuple[Array, ...]:
        try:
            answer = self.answer(inputs, outputs, padded_to)
        except Exception as error:  # whatever a model raises
            sent = ", ".join(str(one) for one in row_types(to_arrays(inputs)))
            raise UsageError(f"the model {self.name} fails on one micro-batch of {sent} per sample: {error}") from error
        why = check_probe(answer)
        if why:
            raise UsageError(f"the model {self.name} is no teacher: {why}")
        return answer


def _pad(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    if len(tensor) >= samples:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(samples - len(tensor), *tensor.shape[1:])])


def _fixed_input(send: tuple[ArrayType, ...], samples: int, number: int) -> dict[str, torch.Tensor]:
    """The input of the probe; integers are all this number, but for uint8: pixels, or 0 to 2."""
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    return {one.name: _fill(one, samples, number, generator) for one in send}


def _fill(one: ArrayType, samples: int, number: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, one.dtype)
    shape = (samples, *one.shape)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    # Integers may be tokens: numbers that any embedding has. A larger one ends the process on a GPU.
    if dtype == torch.uint8 and len(one.shape) >= _PIXEL_DIMENSIONS:
        return torch.randint(0, 256, shape, generator=generator, dtype=dtype)
    if dtype == torch.uint8:
        numbers = 2 * torch.randint(0, 2, shape, generator=generator, dtype=dtype)
        numbers[:1] = 1
        return numbers
    return torch.full(shape, number, dtype=dtype)


def _with_other_samples(tensor: torch.Tensor) -> torch.Tensor:
    """The probe's input with other samples beside the first, which any BatchNorm tells apart from those before.

    They are mirrored at the first one.
    """
    if not tensor.is_floating_point() and tensor.dtype != torch.uint8:
        return tensor
    others = 2 * tensor[:1].double() - tensor[1:].double()
    largest = 0.999 if tensor.is_floating_point() else 255 if tensor.dim() > _PIXEL_DIMENSIONS else 2
    return torch.cat([tensor[:1], others.clamp(0, largest).to(tensor.dtype)])


def _is_about_equal(answer: tuple[Array, ...], other: tuple[Array, ...]) -> bool:
    """Whether the answers to the first sample are equal, but for what shapes, kernels and quantization change."""
    pairs = zip(to_tensors(answer).values(), to_tensors(other).values(), strict=True)
    for one, two in ((one.double(), two.double()) for one, two in pairs if one.is_floating_point()):
        finite = one.isfinite() & two.isfinite()
        one, two = one.where(finite, 0.0), two.where(finite, 0.0)
        if one.numel() and bool((one[0] - two[0]).abs().max() > _LARGEST_CHANGE * one.abs().max()):
            return False
    return True


def device_of(module: torch.nn.Module) -> torch.device:
    """The device of a module's parameters, or else of its buffers; the CPU if it has neither."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


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
