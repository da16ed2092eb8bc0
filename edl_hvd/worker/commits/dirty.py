"""Which tensors have been written since the last commit, and whether two states are the same.

If nothing but optimizer steps moves the parameters, a commit need not copy them: until the next optimizer step they are
what they were at the commit, and a step comes only after the world has summed every gradient of it. A script that moves
parameters by itself (it swaps in an average of them to validate, it prunes, it runs an optimizer of its own) gets
commits that copy. Parameters that nothing moves at all, such as those of a frozen model under trained adapters, need no
copy either.

Writes are seen by the tensors' version counters, and those that bypass them (``parameter.data``) by one element of each
parameter, on the CPU only: on a GPU every look would wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from edl_hvd.worker.trace import Trace

_FINGERPRINT_ELEMENTS = 256  # of a tensor; makes some 100 KB of a large model, read in milliseconds
_CLEAN_COMMITS = 2
# What a script does in every step shows in the first two; whatever it does later makes them twice as many.
_MOST_CLEAN_COMMITS = 1024
_NEVER = 1 << 62


class DirtyTracker:
    """Sees whether anything but one worker's distributed optimizers moves their parameters.

    Args:
        optimizers: The distributed optimizers.
        before_move: Called when one of them is about to move its parameters, with whether something else has moved any
            since the last look.

    Attributes:
        steps: How often each optimizer has moved since the last commit.
        disturbances: How often something else has.
        is_clean: Nothing else has moved parameters lately.
    """

    def __init__(self, optimizers: Sequence[Any], before_move: Callable[[bool], None]) -> None:
        self._optimizers = optimizers
        self._before_move = before_move
        self.steps = [0] * len(optimizers)
        self.dirty_count = 0
        self._clean = 0
        self._needed = _CLEAN_COMMITS
        self._trace = Trace([])
        for number, optimizer in enumerate(optimizers):
            optimizer.stepping.before.append(
                lambda optimizer, closure, number=number: self._before_step(number, closure or _has_hooks(optimizer))
            )
            optimizer.stepping.after.append(self.note)
        self.note()

    @property
    def is_clean(self) -> bool:
        return self._clean >= self._needed

    def commit(self) -> None:
        """The present is a point to come back to."""
        self._clean += 1
        self.steps = [0] * len(self._optimizers)

    def check(self) -> None:
        """Stop trusting a script that has moved parameters itself since the last look."""
        self._judge(self.is_dirty())

    def note(self) -> None:
        """Whatever has moved the parameters up to here was meant to."""
        # One reduction is that of all.
        self._trace = Trace(list(self._optimizers[0].reduction.names) if self._optimizers else [], self._trace)

    def is_dirty(self) -> bool:
        """Something else has moved parameters since the last look."""
        return not self._trace.fits()

    def never_clean(self) -> None:
        """Steps of this script cannot be made again in part: all commits copy everything."""
        self._clean, self._needed = 0, _NEVER

    def mark_dirty(self) -> None:
        """Something else moves parameters: do without copies only after more commits in which nothing does."""
        self.dirty_count += 1
        self._clean, self._needed = 0, min(2 * self._needed, _MOST_CLEAN_COMMITS)

    def _judge(self, is_dirty: bool) -> None:
        if is_dirty:
            self.mark_dirty()
            self.note()

    def _before_step(self, number: int, is_more: bool) -> None:
        is_dirty = self.is_dirty()
        self._before_move(is_dirty)
        if is_more:  # a closure sums gradients meanwhile, and a step that is not made again runs no hooks
            self.never_clean()
        else:
            self._judge(is_dirty)
        self.steps[number] += 1


def _has_hooks(optimizer: Any) -> bool:
    """The script has something of its own done with each step of an optimizer, such as to average the weights."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_post_hooks)


class FrozenParameters:
    """Those of a job's parameters that no optimizer of it moves, and nothing else has moved for some commits.

    Attributes:
        parameters: Those that need no copy.
    """

    def __init__(self) -> None:
        self.parameters: set[torch.nn.Parameter] = set()
        self._candidates: list[torch.nn.Parameter] = []
        self._clean: list[int] = []
        self._needed: list[int] = []
        self._trace = Trace([])

    def consider(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Watch these as well."""
        known = set(self._candidates)
        self._candidates += [parameter for parameter in parameters if parameter not in known]
        self._clean, self._needed = [0] * len(self._candidates), [_CLEAN_COMMITS] * len(self._candidates)
        self.note()

    def drop(self, parameters: Set[torch.nn.Parameter]) -> None:
        """An optimizer moves these from now on."""
        kept = [number for number, parameter in enumerate(self._candidates) if parameter not in parameters]
        if len(kept) < len(self._candidates):
            self._candidates = [self._candidates[number] for number in kept]
            self._clean = [self._clean[number] for number in kept]
            self._needed = [self._needed[number] for number in kept]
            self.parameters -= parameters
            self.note()

    def is_dirty(self) -> bool:
        """Something has moved one of them since the last look."""
        moved = self._trace.moved() if self.parameters else ()
        return any(self._candidates[number] in self.parameters for number in moved)

    def commit(self) -> None:
        """The present is a point to come back to: what has moved since the last look has to be copied for a while."""
        if not self._candidates:
            return
        for number in self._trace.moved():
            self._clean[number], self._needed[number] = -1, min(2 * self._needed[number], _MOST_CLEAN_COMMITS)
        self._clean = [clean + 1 for clean in self._clean]
        self.parameters = {
            parameter
            for parameter, clean, needed in zip(self._candidates, self._clean, self._needed, strict=True)
            if clean >= needed
        }
        self.note()

    def note(self) -> None:
        """Whatever has moved them up to here was meant to."""
        self._trace = Trace(self._candidates, self._trace)


class TensorVersion:
    """Tells later whether a tensor is the same, with nothing written into it meanwhile.

    It keeps the tensor's memory from being given to another one. Not seen: writing through ``.data``, and BatchNorm
    keeping its statistics.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def matches(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._tensor.data_ptr() and tensor._version == self._version


def versions_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorVersion]:
    """The versions of live tensors, by name."""
    return {name: TensorVersion(tensor) for name, tensor in tensors.items()}


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> int:
    """32 bits, the same for equal tensors on whatever device and wherever they lie in memory."""
    digest = 0
    for name, tensor in sorted(tensors.items()):
        few = _some_elements(tensor).cpu().contiguous().view(-1).view(torch.uint8)
        digest = zlib.crc32(few.numpy().tobytes(), zlib.crc32(name.encode(), digest))
    return digest


def _some_elements(tensor: torch.Tensor) -> torch.Tensor:
    """At most ``_FINGERPRINT_ELEMENTS`` elements, spread over it; the same ones however it lies in memory."""
    count = min(_FINGERPRINT_ELEMENTS, tensor.numel())
    if tensor.dim() == 0 or count == 0:
        return tensor
    places = torch.arange(count, device=tensor.device) * (tensor.numel() // count)
    index = []
    for size in reversed(tensor.shape):  # torch.unravel_index imports five hundred modules first
        index.append(places % size)
        places = places.div(size, rounding_mode="floor")
    return tensor[tuple(reversed(index))]
