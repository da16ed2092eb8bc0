"""Whether all workers have the same weights, as they must: any of them may hand its own on to the others.

They begin with the same ones, and move them by the same gradients. What a script computes at step level from what only
one worker has, such as the last micro-batch, or by a generator of its own, drives them apart, without any error. So the
weights are compared after the first steps, then more and more rarely, and at the end of each epoch. So are the numbers,
lists and tensors in ``State``, and the buffers of models but for statistics; these may be meant to differ, which is
said once. With ``exact=True`` a worker that may
round differently is stopped before it computes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from edl_hvd.errors import UsageError
from edl_hvd.worker.codec import encode
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.training.buffers import other_buffers
from edl_hvd.worker.training.round_message import Vote

_TOLERANCE = 1e-4
# Relative to the norm. Hosts that round differently are further apart than nothing, and not that far.
_ROW = 4096
# Elements that are summed in the parameter's own precision.


def is_due(step: int) -> bool:
    """Whether weights are compared after step number ``step``: after 1, 2, 4, 8 and so on."""
    return step & (step - 1) == 0


@dataclass(frozen=True)
class ComparedWorkers:
    """What came of a comparison of workers whose weights are alike.

    Attributes:
        unlike: Names of the attributes that are not the same on all ranks, but for rounding.
        answer: The largest of the ranks' votes, which travelled along.
    """

    unlike: tuple[str, ...]
    answer: Vote


@torch.no_grad()
def check_alike(
    names: Mapping[torch.nn.Parameter, str], attributes: Mapping[str, Any], vote: Vote, collectives: Collectives,
    step: int,
) -> ComparedWorkers:  # fmt: skip
    """Compare the weights of all workers, by two numbers of each parameter, and attributes. Collective; blocks.

    It is one collective, because each costs a wait for the slowest rank.

    Args:
        names: The parameters that the optimizers move, and those of averages; the same on every rank.
        attributes: Those of ``State``.
        vote: What this rank wants at a commit that follows at once.
        collectives: Of the world.
        step: Optimizer steps of the run.

    Raises:
        UsageError: The weights differ; on all ranks.
    """
    names = {p: name for p, name in names.items() if p.is_floating_point() or p.is_complex()}
    attributes = {name: value for name, value in attributes.items() if not name.startswith("_")}
    weights = [numbers.cpu() for numbers in [_numbers_of(parameter) for parameter in names]]
    digests = [float(_digest_of(value, name)) for name, value in attributes.items()]
    own = torch.cat([*weights, torch.tensor(digests, dtype=torch.float64)]).nan_to_num_()
    wanted = torch.tensor(vote, dtype=torch.float64)
    high, low, answer = collectives.allreduce(torch.cat([own, -own, wanted]), "max").split(
        [len(own), len(own), len(wanted)]
    )
    spread = high + low
    _check_weights(names, spread[: 2 * len(names)].view(-1, 2), high[1 : 2 * len(names) : 2], step)
    unlike = spread[2 * len(names) :].tolist()
    return ComparedWorkers(
        tuple(name for name, apart in zip(attributes, unlike, strict=True) if apart), Vote(*answer.tolist())
    )


def _check_weights(
    names: Mapping[torch.nn.Parameter, str], spread: torch.Tensor, norms: torch.Tensor, step: int
) -> None:
    apart = spread.amax(1) > norms.new_tensor([_tolerance(parameter) for parameter in names]) * norms
    if apart.any():
        name = list(names.values())[int(apart.nonzero()[0, 0])]
        raise UsageError(
            f"the workers have different weights {name!r} (and {int(apart.sum()) - 1} more) after step {step}, because "
            "something behind the loop over a step, or between steps, was computed from what only this worker has, "
            "such as its last micro-batch, its loss, its rank or a generator of its own; compute gradients in the body "
            "of `for batch in step:`, and use step.mean(…), or edl_hvd.allreduce, for numbers of the whole batch; "
            "where the first forward pass sets them (ActNorm), run one batch through the model before State is made"
        )


def numerics_fingerprint(device: torch.device) -> dict[str, str]:
    """The properties of this process that decide how it rounds; processes that differ in one may round differently.

    Args:
        device: Device that the model is computed on.
    """
    is_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads (torch.get_num_threads)": str(torch.get_num_threads()),
        "precision of matrix products (torch.get_float32_matmul_precision)": torch.get_float32_matmul_precision(),
    }


def check_same_numerics(own: Mapping[str, str], of_first: Mapping[str, str]) -> None:
    """Stop a worker whose results may differ from those of rank 0 in their last bits.

    Args:
        own: Numerics of this worker.
        of_first: Numerics of rank 0.

    Raises:
        UsageError: They differ.
    """
    others = [f"{name}: {own[name]!r} instead of {of_first[name]!r}" for name in own if own[name] != of_first[name]]
    if others:
        raise UsageError(
            f"exact=True needs workers that compute alike, and this one differs from rank 0 in {'; '.join(others)}; "
            "give all hosts the same hardware and settings (OMP_NUM_THREADS sets the threads), or leave exact=True out"
        )


def buffer_digests(models: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, list[float]]]:
    """Return two numbers of each buffer that only step level may change, by its place, for each of the models.

    Workers may have other buffers, as where a forward pass registers one, so it is one attribute for each model.

    Args:
        models: Models, by their attribute of the state.
    """
    found: dict[str, dict[str, list[float]]] = {f"{attribute}'s buffers": {} for attribute in models}
    for place, module, name in other_buffers(models):
        buffer = module._buffers[name]
        if buffer is None or buffer.is_complex() or isinstance(buffer, UninitializedBuffer):
            continue
        values = buffer.detach().double().reshape(-1)
        # Masks may have the same sum, and ones in other places.
        ramp = torch.linspace(1, 2, values.numel(), dtype=torch.float64, device=values.device)
        found[f"{place.partition('.')[0]}'s buffers"][place] = [float(values.sum()), float(values @ ramp)]
    return found


def _digest_of(value: Any, name: str) -> int:
    plain, tensors = encode(value, name)
    sums = [_sum_of(tensor) for tensor in tensors.values() if not tensor.is_complex()]
    return zlib.crc32(repr(_rounded([plain, sums])).encode())


def _sum_of(tensor: torch.Tensor) -> float:
    is_plain = tensor.dtype == torch.float32 and tensor.layout == torch.strided
    return float(_numbers_of(tensor)[0] if is_plain else tensor.detach().double().sum())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _tolerance(parameter: torch.nn.Parameter) -> float:
    return max(_TOLERANCE, torch.finfo(parameter.dtype).eps)


def _numbers_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sum of its elements, and their norm; float64, on its device.

    Row by row: in float64 throughout it takes fifty times as long, and in float32 throughout it depends on how wide the
    processor's registers are.
    """
    if isinstance(parameter, UninitializedParameter):
        return torch.zeros(2, dtype=torch.float64)
    values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    if values.numel() < _ROW:
        wide = values.double()
        return _sum_and_norm(wide, wide)
    # Whatever the memory format, this is how the elements lie in memory.
    flat = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True)).reshape(-1)
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    whole = flat.numel() // _ROW * _ROW
    rows, rest = flat[:whole].view(-1, _ROW), flat[whole:].double()
    sums, norms = rows.sum(1, dtype=kind), torch.linalg.vector_norm(rows, dim=1, dtype=kind)
    return _sum_and_norm(torch.cat([sums.double(), rest]), torch.cat([norms.double(), rest]))


def _sum_and_norm(sums: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return torch.stack([sums.sum(), torch.linalg.vector_norm(norms)])
