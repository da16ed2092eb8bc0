"""What forward passes change beside what the optimizers move, such that it does not depend on how a batch is dealt.

Three kinds of buffers, each in its own way: running statistics of normalisation layers, vectors of spectral norms, and
others, which are seen and said once, as parameters are that a forward pass sets. All are told where a step is:
:class:`Buffers`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations

from edl_hvd.errors import UsageError
from edl_hvd.worker.position import position
from edl_hvd.worker.trace import TensorTrace
from edl_hvd.worker.training.process_group import ProcessGroup

_LOOKS = 4  # at what a forward pass does to other buffers and to parameters, each epoch
_DIGEST_ELEMENTS = 1 << 16  # of a buffer, that are compared


class RunningStatistics:
    """The running statistics of all normalisation layers of some models; passes are counted per layer.

    A layer keeps r, a mean or a variance, and every forward pass that trains it makes of it

        r ← d·r + p

    with p from the batch of this pass, and d = 1 - momentum, or n / (n + 1) after n passes without momentum.

    Workers run the passes of a step side by side. Each of them starts all its passes from the r that the step began
    with; what p was follows from what r became. All workers then get every p of the step, and go through them in the
    order of the micro-batches, as one worker would have done. What is computed is the same everywhere, and for any
    number of workers.

    Args:
        models: Models with the layers.
        group: Workers that run the passes of a step.

    Raises:
        UsageError: One of the layers computes statistics over the workers of its world.
    """

    def __init__(self, models: Iterable[torch.nn.Module], group: ProcessGroup) -> None:
        self._group = group
        layers = {layer: None for model in models for layer in model.modules() if isinstance(layer, _NormBase)}
        for layer in layers:
            if isinstance(layer, torch.nn.SyncBatchNorm):
                raise UsageError(
                    "exact=True cannot work with SyncBatchNorm, whose statistics are those of the samples that the "
                    "whole world has at a time; use BatchNorm, or GroupNorm"
                )
        self._layers: list[Any] = [layer for layer in layers if layer.running_mean is not None]
        self._values = [value for layer in self._layers for value in (layer.running_mean, layer.running_var)]
        self._sizes = [value.numel() for value in self._values]
        self._start: list[torch.Tensor] = []
        self._passes: list[int] = []  # of each layer, before the step
        self._rows: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin_step(self) -> None:
        """A global batch begins."""
        self._rows = []
        self._start = [value.clone() for value in self._values]
        self._passes = [int(layer.num_batches_tracked) for layer in self._layers]

    @torch.no_grad()
    def end_pass(self) -> None:
        """A micro-batch is through: keep what it made of the statistics, and put those of the step's begin back."""
        if not self._layers:
            return
        counts = []
        for layer, before, i in zip(self._layers, self._passes, range(0, len(self._values), 2), strict=True):
            moved = not torch.equal(layer.running_mean, self._start[i])
            counts.append(float(moved if _counts_nothing(layer) else int(layer.num_batches_tracked) - before))
            layer.num_batches_tracked.fill_(before)
        tail = torch.tensor(counts, dtype=torch.float64, device=self._values[0].device)
        self._rows.append(torch.cat([*(value.double() for value in self._values), tail]))
        torch._foreach_copy_(self._values, self._start)

    @torch.no_grad()
    def end_step(self) -> None:
        """All micro-batches of the step are through, here and elsewhere. Collective; blocks."""
        if not self._layers:
            return
        width = sum(self._sizes) + len(self._layers)
        own = (
            torch.cat(self._rows) if self._rows else torch.empty(0, dtype=torch.float64, device=self._values[0].device)
        )
        collectives = self._group.collectives
        table = collectives.result(collectives.start_gather(own, "edl_hvd.statistics")).view(-1, width)
        counts = table[:, sum(self._sizes) :].tolist()
        columns = table[:, : sum(self._sizes)].split(self._sizes, dim=1)
        for i, layer in enumerate(self._layers):
            passes = [int(row[i]) for row in counts]
            for j in (2 * i, 2 * i + 1):
                self._values[j].copy_(
                    _folded(self._start[j].double(), columns[j], passes, self._passes[i], layer.momentum)
                )
            if not _counts_nothing(layer):
                layer.num_batches_tracked.fill_(self._passes[i] + sum(passes))


def _counts_nothing(layer: torch.nn.Module) -> bool:
    """InstanceNorm has the counter of passes that BatchNorm has, and leaves it at 0."""
    return isinstance(layer, _InstanceNorm)


def _folded(
    start: torch.Tensor, ends: torch.Tensor, passes: list[int], passes_before: int, momentum: float | None
) -> torch.Tensor:
    """What one worker that runs all micro-batches one after the other would have at the end.

    Args:
        start: What all of them started from; shape (channels,), float64.
        ends: What each one made of it; shape (micro-batches, channels).
        passes: How often each one went through the layer.
        passes_before: How often it had been gone through at the start.
        momentum: The layer's; ``None`` for the mean of all passes.
    """
    value, before = start, passes_before
    for end, count in zip(ends, passes, strict=True):
        if count == 0:
            continue
        if momentum is not None:
            decay = (1.0 - momentum) ** count
            value = decay * value + (end - decay * start)
        else:
            here, alone = before + count, passes_before + count
            value = (before * value + (alone * end - passes_before * start)) / here
            before = here
    return value


class PowerIterations:
    """The power iterations of all layers of some models that have a spectral norm, in either form of torch's.

    Each forward pass in training makes a step of the power iteration that finds a weight's largest singular value. What
    it makes of the vectors u and v depends on the weight alone, not on the samples. So all micro-batches of a loop over
    a step start from the same u and v, and these make as many steps as in one pass with the whole batch. A worker
    without a micro-batch gets them from the others.

    Args:
        models: Models with the layers.
        group: Workers that run the passes of a step.
    """

    def __init__(self, models: Iterable[torch.nn.Module], group: ProcessGroup) -> None:
        self._group = group
        vectors = {id(vector): vector for model in models for vector in _vectors_of(model)}
        self._vectors = list(vectors.values())
        self._start: list[torch.Tensor] = []
        self._end: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._vectors)

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        self._start = self._end = [vector.clone() for vector in self._vectors]

    @torch.no_grad()
    def end_pass(self) -> None:
        """A micro-batch is through."""
        self._end = [vector.clone() for vector in self._vectors]
        torch._foreach_copy_(self._vectors, self._start)

    @torch.no_grad()
    def end_step(self) -> None:
        """All micro-batches are through, here and elsewhere. Collective in a step with an idle worker; blocks there."""
        if position.has_idle and self._group.size > 1:
            self._take_over()
        torch._foreach_copy_(self._vectors, self._end)

    def _take_over(self) -> None:
        flat = torch.cat([vector.view(-1).to("cpu", torch.float64) for vector in self._end])
        if self._end is self._start:  # this worker has computed nothing
            flat = torch.full_like(flat, float("-inf"))
        flat = self._group.collectives.allreduce(flat, "max")
        parts = flat.split([vector.numel() for vector in self._vectors])
        self._end = [part.view_as(vector) for part, vector in zip(parts, self._vectors, strict=True)]


def _vectors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    # The older form, a hook: it is imported with torch, by a name that the function of that module hides.
    hook: Any = sys.modules["torch.nn.utils.spectral_norm"]
    for module in model.modules():
        if isinstance(module, parametrizations._SpectralNorm):
            yield from module.buffers(recurse=False)
        for before in module._forward_pre_hooks.values():
            if isinstance(before, hook.SpectralNorm):
                yield from (getattr(module, f"{before.name}_{vector}") for vector in ("u", "v"))


def other_buffers(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the buffers of :class:`OtherBuffers`: place in ``State``, module, and name there; in one order everywhere.

    Args:
        models: Models, by their attribute of the state.
    """
    for attribute, model in models.items():
        for path, module in model.named_modules():
            if isinstance(module, (_NormBase, parametrizations._SpectralNorm, torch.optim.swa_utils.AveragedModel)):
                continue
            for name in sorted(module._buffers.keys() - module._non_persistent_buffers_set - _of_hooks(module)):
                yield f"{attribute}.{path}.{name}".replace("..", "."), module, name


class OtherBuffers:
    """The buffers of some models that are neither running statistics nor vectors of a spectral norm.

    Such as the codebook of a VQ-VAE, the centre of DINO or the queue of MoCo: what they become of a whole global batch
    cannot be told from what they became of its micro-batches, and unlike running statistics they take part in the loss.

    Args:
        models: Models, by their attribute of the state.
        group: Workers that run the passes of a step.
        warn: Says something once, by what it is about.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], group: ProcessGroup, warn: Callable[[str, str], None]
    ) -> None:
        self._group = group
        self._warn = warn
        self._looks = _LOOKS
        self._places = {(module, name): f"state.{place}" for place, module, name in other_buffers(models)}
        self._before: list[object] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        if self._looks:
            self._before = self._look()

    def end_pass(self) -> None:
        """A micro-batch is through."""
        if not self._looks:
            return
        self._looks -= 1
        now = self._look()
        if position.per_step > 1 or self._group.size > 1:
            for place, before, after in zip(self._places.values(), self._before, now, strict=True):
                if before != after:
                    self._warn(
                        "buffer",
                        f"{place}, a buffer, is changed by the forward pass, which sees one micro-batch and not the "
                        "whole global batch, so what it becomes depends on how the batch is dealt; change it behind "
                        "the loop over a step, from sums that edl_hvd.allreduce makes (docs/recipes.md: Buffers that "
                        "training changes)",
                    )
        self._before = now

    def end_step(self) -> None:
        """All micro-batches are through."""

    def _look(self) -> list[object]:
        found = (module._buffers.get(name) for module, name in self._places)
        # A write through ``.data`` counts no version, as in many a codebook that moves by averages.
        return [(id(buffer), buffer._version, _digest(buffer)) if buffer is not None else None for buffer in found]


def _digest(buffer: torch.Tensor) -> int:
    """Return a checksum of some elements, spread over the buffer; of all where it is small."""
    if buffer.layout is not torch.strided or is_lazy(buffer):
        return 0
    few = buffer.detach().reshape(-1)[:: 1 + buffer.numel() // _DIGEST_ELEMENTS]
    return zlib.crc32(few.cpu().contiguous().view(torch.uint8).numpy().tobytes()) if few.numel() else 0


class SetParameters:
    """The parameters that optimizers step and that a forward pass sets, as a data-dependent initialisation does.

    Args:
        names: Names of the parameters.
        group: Workers that run the passes of a step.
        warn: Says something once, by what it is about.
    """

    def __init__(
        self, names: Mapping[torch.nn.Parameter, str], group: ProcessGroup, warn: Callable[[str, str], None]
    ) -> None:
        self._names = names
        self._group = group
        self._warn = warn
        self._looks = _LOOKS
        self._trace: TensorTrace | None = None

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        is_split = position.per_step > 1 or self._group.size > 1
        self._trace = TensorTrace(list(self._names)) if self._looks and is_split else None

    def end_pass(self) -> None:
        """A micro-batch is through."""
        if self._trace is None:
            return
        self._looks -= 1
        moved = self._trace.moved()
        self._trace = None
        if moved:
            self._warn(
                "parameter",
                f"state.{list(self._names.values())[min(moved)]}, a parameter, is changed by the forward pass, as by "
                "an initialisation from the first batch (ActNorm), which sees one micro-batch and not the whole global "
                "batch, so what it becomes depends on how the batch is dealt; run one batch through the model before "
                "State is made, the same on every worker",
            )

    def end_step(self) -> None:
        """All micro-batches are through."""


def _of_hooks(module: torch.nn.Module) -> set[str]:
    """Buffers of the older form of spectral norm, a hook."""
    hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
    return {f"{hook.name}_{vector}" for hook in hooks for vector in ("u", "v")}


class Buffers:
    """What forward passes change beside what the optimizers move: each kind in its own way.

    Args:
        kinds: Of which those are left out that the models have nothing of.
    """

    def __init__(self, *kinds: RunningStatistics | PowerIterations | OtherBuffers | SetParameters) -> None:
        self._kinds = [kind for kind in kinds if kind]

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        for kind in self._kinds:
            kind.begin_step()

    def end_pass(self) -> None:
        """A micro-batch is through."""
        for kind in self._kinds:
            kind.end_pass()

    def end_step(self) -> None:
        """All micro-batches are through, here and elsewhere. Collective; blocks."""
        for kind in self._kinds:
            kind.end_step()
