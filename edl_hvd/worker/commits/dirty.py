"""Whether tensors have changed since the last commit, and whether two states are the same.

If only optimizer steps change the parameters, a commit need not copy them: until the next optimizer step they are what
they were at the commit, and a step comes only after the world has summed every gradient of it. A script may change
parameters by itself: it swaps in an average of them to validate, it prunes, it runs an optimizer of its own. Then its
commits copy. Parameters that nothing changes, such as those of a frozen model under trained adapters, need no copy
either.

Writes are seen by the tensors' version counters, and those that bypass them (``parameter.data``) by one element of each
parameter, on the CPU only: on a GPU every look would wait for it.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from edl_hvd.worker.trace import TensorTrace

_FINGERPRINT_ELEMENTS = 256  # of a tensor; makes some 100 KB of a large model, read in milliseconds
_CLEAN_COMMITS = 2
# What a script does in every step shows in the first two; whatever it does later doubles the number.
_MOST_CLEAN_COMMITS = 1024
_NEVER = 1 << 62
_version_of = operator.attrgetter("_version")


class DirtyTracker:
    """Tells which tensors of a state have changed since the last commit, and whether the script changed them itself.

    Args:
        optimizers: Distributed optimizers of the state.

    Attributes:
        stepped: Watch on the parameters that the optimizers step.
        frozen: Watch on the parameters that none of them steps.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.stepped = SteppedParameters(optimizers)
        self.frozen = FrozenParameters()
        self._versions: dict[str, TensorVersion] = {}

    @property
    def is_clean(self) -> bool:
        """Whether only steps have changed the stepped parameters lately."""
        return self.stepped.is_clean

    def is_dirty(self) -> bool:
        """Return whether the script has changed parameters by itself since the last check."""
        return self.stepped.is_dirty() or self.frozen.is_dirty()

    def is_dirty_since_commit(self) -> bool:
        """Return whether the script has changed by itself, since the last commit, what a commit may leave out."""
        return self.stepped.was_dirty or self.stepped.has_dirty_states() or self.is_dirty()

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that the script has changed by itself since the last check, and that no commit copies."""
        return [*self.stepped.moved(), *self.frozen.moved()]

    def check(self) -> None:
        """Look for changes by the script since the last check; the next commits copy what it has changed."""
        self.stepped.check()
        self.frozen.check()

    def mark_dirty(self) -> None:
        """Have the next commits copy the stepped parameters, and the frozen ones that have changed."""
        self.stepped.mark_dirty()
        self.frozen.check()

    def accept_changes(self) -> None:
        """Take the present values as those that no script has changed."""
        self.stepped.accept_changes()
        self.stepped.accept_states()
        self.frozen.accept_changes()

    def adopt(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note that the optimizers step these, too, from now on."""
        self.stepped.parameters.update(parameters)
        self.frozen.drop(self.stepped.parameters)

    def set_copied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note that the last commit equals these live tensors, and holds no others."""
        self._versions = versions_of(tensors)

    def update_copied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note that the last commit equals these live tensors, besides those that it held."""
        self._versions.update(versions_of(tensors))

    def written(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of these live tensors that may differ from the last commit."""
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name not in self._versions or not self._versions[name].matches(tensor)
        }


class SteppedParameters:
    """The parameters of one worker that its distributed optimizers step; sees whether anything else changes them.

    It sees as well whether anything else writes into the tensors of an optimizer's state, between a commit and that
    optimizer's next step. Steps write there themselves, so these tensors are looked at once at either end.

    Args:
        optimizers: Distributed optimizers.

    Attributes:
        parameters: Parameters that the optimizers step, as far as the state has noticed.
        steps: Number of steps of each optimizer since the last commit.
        dirty_count: Number of times that something else has changed parameters.
        was_dirty: Whether a check since the last commit has found that something else has changed parameters.
        before_step: Called when an optimizer is about to change its parameters, with whether something else has changed
            any since the last check.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self.parameters: set[torch.nn.Parameter] = set(self._named())
        self.before_step: list[Callable[[bool], None]] = []
        self.steps = [0] * len(optimizers)
        self.dirty_count = 0
        self.was_dirty = False
        self._clean_commits = 0
        self._needed_commits = _CLEAN_COMMITS
        self._trace = TensorTrace([])
        self._states: list[_StateVersions | None] = []  # of each optimizer at the commit; None behind its next step
        for optimizer in optimizers:
            optimizer.stepping.before.add(self._on_step)
            optimizer.stepping.after.add(self.accept_changes)
        self.accept_changes()
        self.accept_states()

    @property
    def is_clean(self) -> bool:
        """Whether nothing else has changed parameters for enough commits."""
        return self._clean_commits >= self._needed_commits

    def begin_commit(self) -> None:
        """Count steps from now on: a commit has been made."""
        self._clean_commits += 1
        self.forget_changes()

    def forget_changes(self) -> None:
        """Count steps from now on: the last commit has been made, or restored."""
        self.steps, self.was_dirty = [0] * len(self._optimizers), False
        self.accept_states()

    def is_dirty(self) -> bool:
        """Return whether something else has changed parameters since the last check."""
        return not self._trace.fits()

    def check(self) -> None:
        """Stop trusting a script that has changed parameters by itself since the last check."""
        self._judge(self.is_dirty())

    def accept_changes(self) -> None:
        """Take the present values as those that nothing else has changed."""
        # One reduction is that of all optimizers.
        self._trace = TensorTrace(list(self._named()), self._trace)

    def has_dirty_states(self) -> bool:
        """Return whether something else has changed the state of an optimizer that has not stepped since the commit."""
        return any(map(self._has_dirty_state, range(len(self._optimizers))))

    def accept_states(self) -> None:
        """Take the present states of the optimizers as those that nothing else has changed."""
        self._states = [_versions_of_state(optimizer) for optimizer in self._optimizers]

    def moved(self) -> list[torch.Tensor]:
        """Return the parameters, and tensors of states, that something else has changed since the last check."""
        parameters = list(self._named())
        found: list[torch.Tensor] = [parameters[number] for number in self._trace.moved()]
        for optimizer, before in zip(self._optimizers, self._states, strict=True):
            if before is not None:
                known = set(before)
                now = _versions_of_state(optimizer)
                tensors = {id(tensor): tensor for tensor in _tensors_of_state(optimizer)}
                found += [tensors[place] for place, version in now if (place, version) not in known]
        return found

    def mark_dirty(self) -> None:
        """Copy these parameters until more commits than before were clean."""
        self.dirty_count += 1
        self._clean_commits = 0
        self._needed_commits = max(self._needed_commits, min(2 * self._needed_commits, _MOST_CLEAN_COMMITS))

    def trust(self) -> None:
        """Copy these parameters no more until something else changes them: nothing has where the same script runs."""
        self._clean_commits = self._needed_commits

    def never_clean(self) -> None:
        """Copy these parameters at every commit: steps of this script cannot be made again in part."""
        self._clean_commits, self._needed_commits = 0, _NEVER

    def _named(self) -> Iterable[torch.nn.Parameter]:
        return self._optimizers[0].reduction.names if self._optimizers else ()

    def _has_dirty_state(self, number: int) -> bool:
        before = self._states[number]
        return before is not None and before != _versions_of_state(self._optimizers[number])

    def _judge(self, is_dirty: bool) -> None:
        if is_dirty:
            self.mark_dirty()
            self.was_dirty = True
            self.accept_changes()

    def _on_step(self, optimizer: Any, closure: bool) -> None:
        number = self._optimizers.index(optimizer)
        is_dirty = self.is_dirty() or self._has_dirty_state(number)
        self._states[number] = None
        for callback in self.before_step:
            callback(is_dirty)
        # A closure sums gradients meanwhile, and a step that is not made again runs no hooks.
        if closure or _has_hooks(optimizer):
            self.never_clean()
        else:
            self._judge(is_dirty)
        self.steps[number] += 1


_StateVersions = list[tuple[int, int]]
# Identity and version of each tensor of an optimizer's state.


def _tensors_of_state(optimizer: Any) -> list[torch.Tensor]:
    # An optimizer has hundreds of them: isinstance would take three times as long.
    return [
        value
        for kept in optimizer.state.values()
        if type(kept) is dict
        for value in kept.values()
        if type(value) is torch.Tensor
    ]


def _versions_of_state(optimizer: Any) -> _StateVersions:
    tensors = _tensors_of_state(optimizer)
    return list(zip(map(id, tensors), map(_version_of, tensors), strict=True))


def _has_hooks(optimizer: Any) -> bool:
    """Whether the script has something of its own done with each step of an optimizer, such as to average weights."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_post_hooks)


class FrozenParameters:
    """The parameters of one worker that no optimizer of the job steps; sees which of them nothing has changed lately.

    Attributes:
        parameters: Parameters that nothing has changed for enough commits, so that no commit copies them.
    """

    def __init__(self) -> None:
        self.parameters: set[torch.nn.Parameter] = set()
        self._candidates: list[torch.nn.Parameter] = []
        self._clean_commits: list[int] = []
        self._needed_commits: list[int] = []
        self._trace = TensorTrace([])

    def consider(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Watch these as well."""
        known = set(self._candidates)
        self._candidates += [parameter for parameter in parameters if parameter not in known]
        self._clean_commits = [0] * len(self._candidates)
        self._needed_commits = [_CLEAN_COMMITS] * len(self._candidates)
        self.accept_changes()

    def drop(self, parameters: Set[torch.nn.Parameter]) -> None:
        """Watch these no more: an optimizer steps them from now on."""
        kept = [number for number, parameter in enumerate(self._candidates) if parameter not in parameters]
        if len(kept) < len(self._candidates):
            self._candidates = [self._candidates[number] for number in kept]
            self._clean_commits = [self._clean_commits[number] for number in kept]
            self._needed_commits = [self._needed_commits[number] for number in kept]
            self.parameters -= parameters
            self.accept_changes()

    def is_dirty(self) -> bool:
        """Return whether one that no commit copies has changed since the last check."""
        return bool(self.moved())

    def moved(self) -> list[torch.Tensor]:
        """Return those that no commit copies and that have changed since the last check."""
        changed = [self._candidates[number] for number in self._trace.moved()] if self.parameters else []
        return [parameter for parameter in changed if parameter in self.parameters]

    def check(self) -> None:
        """Find those that need no copy at the commit to come: what has changed since the last check is copied."""
        if not self._candidates:
            return
        for number in self._trace.moved():
            self._clean_commits[number] = -1
            self._needed_commits[number] = min(2 * self._needed_commits[number], _MOST_CLEAN_COMMITS)
        self._clean_commits = [clean + 1 for clean in self._clean_commits]
        commits = zip(self._candidates, self._clean_commits, self._needed_commits, strict=True)
        self.parameters = {parameter for parameter, clean, needed in commits if clean >= needed}
        self.accept_changes()

    def accept_changes(self) -> None:
        """Take the present values as those that nothing has changed."""
        self._trace = TensorTrace(self._candidates, self._trace)


class TensorVersion:
    """The version counter of a tensor at one moment.

    It keeps the tensor's memory from being given to another one. It does not see writes through ``.data``, nor
    BatchNorm updating its statistics.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def matches(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the same tensor, with nothing written into it since."""
        return tensor.data_ptr() == self._tensor.data_ptr() and tensor._version == self._version


def versions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorVersion]:
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
