"""Summing gradients over the world.

Gradient of a step, with micro-batches j of weight w_j, by default their number of samples n_j, and W = sum of w_j:

    g = sum over j of (w_j / W) · g_j,      g_j the gradient of the user's mean loss over micro-batch j

so it equals the gradient of the mean loss over the global batch, for any dealing. A worker accumulates its own g_j in
units of the weight of its first one (equal weights, the usual case, cost nothing).

Until the world has summed it, a gradient is not in ``.grad``, where a script could cut, clear or read a part of it: a
hook takes it from there as soon as backward has finished it. What was in ``.grad`` before is set aside, and the sum is
added to it, as ``backward()`` alone would have done. So ``.grad`` is what PyTorch would have made of the global batch.

A **round** sums what has been computed since the last one. All workers make the same rounds: in ``state.steps`` one
after each loop over a step's micro-batches, elsewhere one at the end of each ``backward()`` that ends a step. A round
has one small message, ``_Flags``: who has a gradient of which parameter, how much all micro-batches weigh, and what
each rank votes for at the coming commit. A parameter that nobody has a gradient of is not summed, and its ``.grad``
stays as it is, ``None`` mostly. The sums of the others start as soon as backward has finished them, if it is known
which backward is the last to touch them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.position import position
from edl_hvd.worker.training.noise import NoiseMeter

# Floats count exactly up to 2^24 only; weights are sent in two parts.
_HALF_WEIGHT = 4096
# Recorded numbers in four: multiples of these two, of 1, and the fraction. Up to 2^48 only the fraction has an error.
_HIGH, _MIDDLE, _LARGEST = 2.0**24, 2.0**12, 2.0**48
_PARTS = 4
_NOTHING = (0.0,) * (2 * _PARTS)  # of one name and row: the total and the weight
# A rank that has a gradient of a parameter counts 1, and this more where the script had left one in ``.grad``.
_HAD_GRADIENT = 1024.0


@dataclass(frozen=True)
class MicroBatch:
    """The part of a global batch that the next backward computes.

    Attributes:
        samples: n_j; 0 for a worker that was dealt nothing.
        global_samples: G.
        first: It is this worker's first of the step, or of one loop over it.
        last: It is this worker's last.
        index: j, in the global batch.
        unit: Samples of every micro-batch of the step but the last one, which may have fewer; at least 1.
        offset: Of its first sample, in the epoch's order.
    """

    samples: int
    global_samples: int
    first: bool
    last: bool
    index: int = 0
    unit: int = 1
    offset: int = 0


class Vote(NamedTuple):
    """What a rank wants at the coming commit, as 0 or 1; summed over the ranks it says how many want it.

    Attributes:
        resize: A change of the world is pending.
        checkpoint: A checkpoint is due.
        writing: A checkpoint is being written.
        stop: The job is to end.
        metrics: Metrics have counted something that the other ranks do not know of.
    """

    resize: float = 0.0
    checkpoint: float = 0.0
    writing: float = 0.0
    stop: float = 0.0
    metrics: float = 0.0


class _Flags(NamedTuple):
    """The message of a round, in front of the flags of the parameters and the recorded values; sums over the ranks."""

    skipped: float  # the script has left the body of state.batches without backward()
    late: float  # gradients came after their sums had started
    unnamed: float  # values were recorded by names that the other ranks do not know
    weight_high: float
    weight_low: float


_WIDTH = len(Vote._fields) + len(_Flags._fields)


class Recorded(NamedTuple):
    """What a rank has recorded by one name: the sum of weight times value, and of the weights."""

    total: float = 0.0
    weight: float = 0.0


class Reduction:
    """Sums the gradients of all optimizers of a ``State``; an optimizer that is in none has one of its own.

    Attributes:
        names: Of the parameters, unique and the same on every rank.
        catalogue: Names of parameters that may come later.
        is_joined: The optimizers are part of a ``State``.
        has_stepped: An optimizer has stepped since the last commit.
        is_interleaved: In some step there was another round after an optimizer had stepped.
        learning_rate_factor: What the batch policy multiplies the learning rate with in the present step.
        micro_batch: Being computed; ``None`` in a script without ``state.batches`` and ``state.steps``.
        deferred: Rounds are made by the loop over a step, not by ``backward()``.
        vote: Asked for that of this rank, when a round is made: it travels with it.
        answer: The sum of the votes of the last round; ``None`` before the first of a step.
        recorded: What this rank has recorded since the last round, by name and row.
        means: Of all that was recorded over the world, of the last round.
        announces: Before each round the ranks tell each other that it comes, because some have no micro-batch.
        rounds: Rounds since the step began.
        round_number: Of the last round of all.
        step_has_gradient: Some rank has given one in this step.
        skipped: Ranks that have left the body of ``state.batches`` without ``backward()`` in this step.
        on_round: Called after each round.
        paused: Gradients accumulate (``no_sync``).
        noise: Measures how noisy the gradients are; ``None`` where nobody wants to know.
    """

    is_exact = False

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self.names: dict[torch.nn.Parameter, str] = {}
        self.catalogue: dict[torch.nn.Parameter, str] = {}
        self.is_joined = self.is_interleaved = self.has_stepped = False
        self.learning_rate_factor = 1.0
        self.micro_batch: MicroBatch | None = None
        self.deferred = self.paused = self.announces = False
        self.vote: Callable[[], Vote] = Vote
        self.answer: Vote | None = None
        self.recorded: dict[str, dict[int, Recorded]] = {}
        self._unread: list[tuple[torch.Tensor, dict[int, Recorded], int, float]] = []  # as well, still on the device
        self.means: dict[str, float] = {}
        self.rounds = self.round_number = self.skipped = 0
        self.on_round: list[Callable[[], None]] = []
        self.noise: NoiseMeter | None = None
        self._hooks: dict[torch.nn.Parameter, _Hooks] = {}
        self._known_names: list[str] = []  # of recorded values, the same on every rank
        self._weight = self._total_weight = 1.0  # of the present micro-batch, and of all of this rank's
        self._normaliser = 0.0  # W of the last round, where it was not G
        self._has_gradient = False  # of the present micro-batch
        self._fired: dict[torch.nn.Parameter, int] = {}  # gradients of the present micro-batch
        self._expected: dict[int, dict[torch.nn.Parameter, int]] = {}  # the same, last time, of each loop over a step
        self.rounds_of_body = 0  # since the present micro-batch began
        self._found: dict[torch.nn.Parameter, torch.Tensor] = {}  # in .grad, when it began
        self._loop = 0  # over the micro-batches, in this step
        self.step_has_gradient = False  # of any rank
        self._begin_round()
        self.adopt(named_parameters)

    # --- parameters ---

    def adopt(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Sum the gradients of these as well."""
        self.names.update((parameter, name) for name, parameter in named_parameters)
        self.attach()

    def adopt_unnamed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The same, by the names that the models of the state have for them, or by their place."""
        new = [parameter for parameter in parameters if parameter not in self.names]
        count = len(self.names)
        self.adopt((self.catalogue.get(p, f"parameter.{count + i}"), p) for i, p in enumerate(new))

    def attach(self) -> None:
        """Take the gradients of all parameters that require one by now."""
        if len(self._hooks) == len(self.names):
            return
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = _Hooks(parameter, self._before_gradient, self._on_gradient)

    def hooked_by_script(self) -> list[str]:
        """Names of the parameters whose gradient goes through a hook that is not of this reduction."""
        return [
            name
            for parameter, name in self.names.items()
            if parameter._backward_hooks
            or len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > (parameter in self._hooks)
        ]

    def refresh(self) -> None:
        """The same, where a parameter may have moved to another device since."""
        for parameter, hooks in self._hooks.items():
            if parameter.requires_grad and not hooks.fits(parameter):
                hooks.remove()
                self._hooks[parameter] = _Hooks(parameter, self._before_gradient, self._on_gradient)
        self.attach()

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Leave those of these parameters alone."""
        for parameter in parameters:
            self.names.pop(parameter, None)
            hooks = self._hooks.pop(parameter, None)
            if hooks is not None:
                hooks.remove()

    def detach(self) -> None:
        """Leave the gradients alone from now on: another reduction sums them."""
        for hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()

    def measure_noise(self) -> None:
        """From the next step on, tell how noisy its gradient was (``NoiseMeter.observation``)."""
        if self.noise is None:
            self.noise = NoiseMeter()

    # --- a step ---

    @property
    def at_boundary(self) -> bool:
        """Backward now completes a global batch."""
        return self.micro_batch is None or self.micro_batch.last

    @property
    def has_computed(self) -> bool:
        """The present micro-batch has given a gradient."""
        return self._has_gradient

    def begin_step(self, announces: bool = False) -> None:
        """A global batch begins. ``announces``: some rank has no micro-batch of it, and the loop is that of batches."""
        self.vote, self.answer, self.announces = Vote, None, announces
        self.rounds = self.skipped = self._loop = 0
        self.means = {}
        self.step_has_gradient = self.has_stepped = False
        self.attach()
        self._begin_round()

    def begin(self, micro_batch: MicroBatch) -> None:
        """The next backward computes this."""
        self._end_micro_batch()
        self.micro_batch = micro_batch
        self.rounds_of_body = 0
        self._found = {parameter: parameter.grad for parameter in self.names if parameter.grad is not None}
        self._weight = float(micro_batch.samples)
        if micro_batch.first:
            self._total_weight = 0.0
            self.attach()
        self._total_weight += self._weight
        self._has_gradient = False
        self._fired.clear()
        if self.noise is not None:
            self.noise.begin(micro_batch)

    def weigh(self, weight: float) -> None:
        """The micro-batch weighs this much, instead of its number of samples.

        Raises:
            UsageError: Its gradient has been computed already.
        """
        if self._has_gradient:
            raise UsageError(
                "step.weigh() was called after backward() of the same micro-batch; call it before, because the "
                "gradient is multiplied with the weight as soon as it is computed"
            )
        if self.is_exact and not float(weight).is_integer():
            raise UsageError(
                f"step.weigh() was given {weight}; with exact=True expected a whole number, because sums of others "
                "depend on their order"
            )
        self._total_weight += weight - self._weight
        self._weight = weight

    def forget(self) -> None:
        """Drop what is under way: the world it was for is gone, or the loop has ended."""
        self.micro_batch = None
        self.answer = None
        self.deferred = self.announces = False
        self.vote = Vote
        self.recorded.clear()
        self._unread.clear()
        for parameter in self._present:
            parameter.grad = None
        self._found.clear()
        self._weight = self._total_weight = 1.0
        if self.noise is not None:
            self.noise.forget()
        self._begin_round()

    def forget_world(self) -> None:
        """The next world is another one: what its ranks have in common has to be found out anew."""
        self.forget()
        self._known_names.clear()
        self._normaliser = 0.0

    def _begin_round(self) -> None:
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # this rank's part
        self._late: dict[torch.nn.Parameter, torch.Tensor] = {}  # what came after its sum had started
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}  # what .grad held
        self._present: dict[torch.nn.Parameter, int] = {}  # in .grad, of the present micro-batch: its version
        self._sums: dict[torch.nn.Parameter, Any] = {}  # under way
        self._unit: float | None = None  # weight that the held gradients count as 1
        self._finish_queued = False

    # --- gradients ---

    def _before_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Autograd is about to add to ``.grad``: set aside what the script has left there."""
        gradient = parameter.grad
        if gradient is None or self._is_apart:
            return
        if parameter in self._present:
            self._check_unchanged(parameter, gradient)
        else:
            self._before[parameter] = gradient
            parameter.grad = None

    @property
    def _is_apart(self) -> bool:
        """The script computes a gradient beside the loop over a step, as every rank does: it needs no sum."""
        return self.deferred and not position.in_micro_batch

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Autograd has added to ``.grad``."""
        if not torch.is_grad_enabled():
            self._receive(parameter)
            return
        with torch.no_grad():  # backward(create_graph=True)
            self._receive(parameter)

    def _receive(self, parameter: torch.nn.Parameter) -> None:
        if self._is_apart:
            self._check_apart()
            return
        gradient = parameter.grad
        if gradient is None:
            return
        self._accept(parameter, gradient)
        count = self._fired[parameter] = self._fired.get(parameter, 0) + 1
        if self.deferred:
            self._present[parameter] = gradient._version
            if self.at_boundary and count == self._expected.get(self._loop, {}).get(parameter) and not self.paused:
                self._take(parameter)
                self._start_early(parameter)
            return
        parameter.grad = None
        self._keep(parameter, gradient)
        if self.paused or not self.at_boundary:
            return
        self._start_early(parameter)
        if not self._finish_queued:
            self._finish_queued = True
            # Runs when this backward is through, on the thread that called it.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _check_apart(self) -> None:
        if not self.step_has_gradient:
            raise UsageError(
                "backward() was called in `for step in state.steps(loader):` outside the loop over the step's "
                "micro-batches, and none of them has given a gradient; write `for batch in step:` and call backward() "
                "in its body, and move what every worker computes alike, such as a penalty on weights, behind that loop"
            )

    def _is_started(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._sums

    def _has(self, parameter: torch.nn.Parameter) -> bool:
        """This rank has a gradient of it in this round."""
        return parameter in self._held

    def _accept(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Refuse a gradient that cannot be summed, or comes where it must not."""
        if gradient.is_sparse:
            raise UsageError(
                f"the gradient of {self.names[parameter]!r} is sparse, which cannot be summed over a changing world; "
                "build the module with sparse=False"
            )
        if position.in_batches and position.per_step > 1 and self.rounds:
            raise UsageError(
                f"backward() computed the gradient of {self.names[parameter]!r} a second time in one body of "
                f"state.batches(), whose global batch is {position.per_step} micro-batches; write the loop with "
                "`for step in state.steps(loader):`, which takes any number of backward passes, or add the losses"
            )
        if not self.is_joined and (position.in_step or position.in_batches):
            raise UsageError(
                f"backward() computed a gradient for {self.names[parameter]!r}, whose DistributedOptimizer State(…) "
                "was not given, so its steps would be lost with a worker; add it: State(optimizer=optimizer, …)"
            )
        self._has_gradient = True

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Take from ``.grad`` what the micro-batch has left there, unless the script has let go of it."""
        if parameter not in self._present:
            return
        gradient = parameter.grad
        if gradient is not None:
            self._check_unchanged(parameter, gradient)
            parameter.grad = None
            self._keep(parameter, gradient)
        self._present.pop(parameter, None)

    def _end_micro_batch(self) -> None:
        """In the loop over a step ``.grad`` is the gradient of the micro-batch, up to its end."""
        if self._present:
            with torch.no_grad():
                for parameter in list(self._present):
                    self._take(parameter)
        if self.micro_batch is not None and not self.rounds_of_body:
            self._take_assigned()

    def _take_assigned(self) -> None:
        """A script may have put a gradient into ``.grad`` by itself, for instance from ``torch.autograd.grad``."""
        for parameter in self.names:
            gradient = parameter.grad
            if gradient is None or gradient is self._found.get(parameter) or parameter in self._before:
                continue
            parameter.grad = None
            self._keep(parameter, gradient.detach())

    def _check_unchanged(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A script may clear the gradient of a micro-batch; cutting it there would do something else than it looks."""
        if gradient._version != self._present[parameter] and gradient.count_nonzero():
            raise UsageError(
                f"the gradient of {self.names[parameter]!r} was changed in the loop over a step's micro-batches, where "
                "it is not complete; move what changes it, such as clip_grad_norm_, after that loop, into the body of "
                "`for step in state.steps(loader):`"
            )

    def _keep(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient to this rank's part of the round."""
        if self._weight == 0:
            return
        if self._unit is None:
            self._unit = self._first_unit()
        if self._is_started(parameter):
            self._accumulate(self._late, parameter, gradient)
            return
        self._accumulate(self._held, parameter, gradient)
        if self.noise is not None:
            self.noise.small(parameter, self._held[parameter], self._weight / self._unit)

    def _first_unit(self) -> float:
        """The weight whose gradient counts as it is."""
        return self._weight

    def _accumulate(
        self, into: dict[torch.nn.Parameter, torch.Tensor], parameter: torch.nn.Parameter, gradient: torch.Tensor
    ) -> None:
        assert self._unit is not None
        share = self._weight / self._unit
        held = into.get(parameter)
        if held is not None:
            held.add_(gradient, alpha=share)
        else:
            gradient = gradient.detach() if gradient.requires_grad else gradient
            into[parameter] = gradient if share == 1.0 else gradient.mul_(share)

    def _end_backward(self) -> None:
        self._finish_queued = False
        if _is_nested():
            raise UsageError(
                "activation checkpointing with use_reentrant=True runs a backward pass inside another, so in "
                "state.batches() nobody can tell when a step's gradient is complete; give checkpoint(…) "
                "use_reentrant=False, or write the loop with `for step in state.steps(loader):`"
            )
        self.complete()

    # --- rounds ---

    def _scale(self) -> float:
        """What this rank's part is multiplied with before it is summed."""
        if self.micro_batch is None:
            return 1.0 / process.size()
        return (self._unit or 0.0) / (self._normaliser or self.micro_batch.global_samples)

    def _start_early(self, parameter: torch.nn.Parameter) -> None:
        """The rank's part of this gradient is complete, or almost certainly so."""
        if process.size() > 1 and parameter in self._held:
            self._start(parameter, self._held[parameter], "gradient")

    def _start(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, kind: str) -> None:
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.stride() != parameter.stride():
            # Every rank sums in memory order, so the order has to be that of the parameter on all of them.
            gradient = torch.empty_like(parameter).copy_(gradient)
        self._held[parameter] = gradient
        name = f"edl_hvd.{kind}.{self.names[parameter]}"
        self._sums[parameter] = process.current().collectives.start_sum(gradient, name, self._scale())

    @torch.no_grad()
    def complete(self, skipped: bool = False) -> None:
        """Make a round. A collective over the world.

        Args:
            skipped: The script has left the body of ``state.batches`` without ``backward()``.
        """
        self._end_micro_batch()
        self._read_recorded()
        self._refuse_unseen()
        if self.announces:
            self.announce(True)
        if process.size() == 1:
            self._complete_alone()
        else:
            self._complete_together(skipped)
        if self.deferred:
            self._expected[self._loop] = dict(self._fired)
            self._loop += 1
        self.is_interleaved |= self.has_stepped
        self.rounds += 1
        self.rounds_of_body += 1
        self.round_number += 1
        self._begin_round()
        for callback in self.on_round:
            callback()

    def _refuse_unseen(self) -> None:
        """A parameter that a script unfreezes in the middle of a micro-batch has a gradient that nobody has taken."""
        if len(self._hooks) == len(self.names):
            return
        for parameter, name in self.names.items():
            if parameter not in self._hooks and parameter.grad is not None:
                raise UsageError(
                    f"{name!r} was made to require a gradient while a micro-batch was computed; call requires_grad_() "
                    "before the loop, or at step level in `for step in state.steps(loader):`"
                )

    def announce(self, comes: bool, leaves: bool = False) -> tuple[bool, bool]:
        """Tell the other ranks whether this one makes another round in this step, or leaves the loop. Collective.

        Returns:
            Whether any makes another round, and whether any leaves.
        """
        word = torch.tensor([float(comes), float(leaves)])
        collectives = process.current().collectives
        collectives.finish([collectives.start_sum(word, "edl_hvd.announce", 1.0)])
        coming, leaving = word.tolist()
        return coming > 0, leaving > 0

    def follow(self, leaves: bool = False) -> bool:
        """Make the rounds that the others make in this step, with a share of nothing; whether any leaves the loop."""
        while True:
            comes, anybody_leaves = self.announce(False, leaves)
            if not comes:
                return anybody_leaves
            self.announces = False
            self.complete()
            self.announces = True

    def _complete_alone(self) -> None:
        self.answer = self.vote()
        if self.recorded:
            self._known_names = sorted({*self._known_names, *self.recorded})
            # As a message would have them: the same numbers as in any other world.
            self._take_means(torch.tensor(self._values(), dtype=torch.float32).tolist())
        self._sum_alone([parameter for parameter in self.names if self._has(parameter)])

    def _sum_alone(self, used: list[torch.nn.Parameter]) -> None:
        factor = 1.0 if self.micro_batch is None else (self._unit or 0.0) / self._total_weight
        if factor != 1.0 and used:
            torch._foreach_mul_([self._held[parameter] for parameter in used], factor)
        process.current().collectives.finish(self.noise.start() if self.noise is not None else [])
        self._publish({parameter: self._held[parameter] for parameter in used})

    def _complete_together(self, skipped: bool) -> None:
        collectives = process.current().collectives
        is_unnamed = not self.recorded.keys() <= set(self._known_names)
        high, low = divmod(self._total_weight, _HALF_WEIGHT)
        used = [self._has(p) * (1.0 + _HAD_GRADIENT * (p in self._before)) for p in self.names]
        own = _Flags(float(skipped), float(bool(self._late)), float(is_unnamed), high, low)
        message = torch.tensor([*self.vote(), *own, *self._values(), *used], dtype=torch.float32)
        collectives.finish([collectives.start_sum(message, "edl_hvd.flags", 1.0)])
        numbers = message.tolist()
        self.answer, flags = Vote(*numbers[: len(Vote._fields)]), _Flags(*numbers[len(Vote._fields) : _WIDTH])
        values, counts = numbers[_WIDTH : -len(used)], numbers[-len(used) :]
        if flags.unnamed:
            values = self._values_by_new_names()
        self._take_means(values)
        self.skipped += round(flags.skipped)
        weight = flags.weight_high * _HALF_WEIGHT + flags.weight_low
        for parameter, count in zip(self.names, counts, strict=True):
            # Where the script has cleared it before it computed one, it is so on the ranks that computed none, too.
            if 0 < count < _HAD_GRADIENT:
                self._before.pop(parameter, None)
                parameter.grad = None
        self._sum([p for p, count in zip(self.names, counts, strict=True) if count > 0], weight, flags.late > 0)

    def _sum(self, used: Sequence[torch.nn.Parameter], weight: float, is_late: bool) -> None:
        """Sum the gradients of the parameters that some rank has one of.

        Args:
            used: They; the same on every rank.
            weight: W.
            is_late: Some rank has gradients that came after their sums had started.
        """
        collectives = process.current().collectives
        for parameter in used:
            if parameter not in self._sums:
                self._start(parameter, self._held.get(parameter), "gradient")
        measured = self.noise.start() if self.noise is not None else []
        collectives.finish([*(self._sums[parameter] for parameter in used), *measured])
        if is_late:
            self._sum_late(used)
        if self.micro_batch is not None:
            normaliser = self._normaliser or self.micro_batch.global_samples
            if weight != normaliser and weight > 0 and used:
                torch._foreach_mul_([self._held[parameter] for parameter in used], normaliser / weight)
            self._normaliser = weight if weight != self.micro_batch.global_samples else 0.0
        self._publish({parameter: self._held[parameter] for parameter in used})

    def _sum_late(self, used: Sequence[torch.nn.Parameter]) -> None:
        first = {parameter: self._held[parameter] for parameter in used}
        self._sums.clear()
        for parameter in used:
            self._start(parameter, self._late.get(parameter), "late")
        process.current().collectives.finish([self._sums[parameter] for parameter in used])
        for parameter in used:
            self._held[parameter].add_(first[parameter])

    def _publish(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Make the sums the parameters' gradients, added to what was there."""
        self.step_has_gradient |= bool(sums)
        if self.noise is not None:
            self.noise.large(sums.values())
        for parameter, gradient in self._before.items():
            if parameter not in sums:
                parameter.grad = gradient
        for parameter, gradient in sums.items():
            before = self._before.get(parameter, parameter.grad)
            parameter.grad = gradient if before is None else before.add_(gradient)

    # --- recorded values ---

    def record(self, name: str, value: float | torch.Tensor) -> None:
        """Add a value of the present micro-batch to what is averaged over the world by its weight."""
        rows = self.recorded.setdefault(name, {})
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            # Read when the round is made: every read waits for the device.
            self._unread.append((value.detach().reshape(()).double(), rows, self._row, self._weight))
        else:
            self._add_recorded(rows, self._row, float(value), self._weight)

    def _read_recorded(self) -> None:
        values = torch.stack([value for value, *_ in self._unread]).tolist() if self._unread else []
        for value, (_, rows, row, weight) in zip(values, self._unread, strict=True):
            self._add_recorded(rows, row, value, weight)
        self._unread.clear()

    @staticmethod
    def _add_recorded(rows: dict[int, Recorded], row: int, value: float, weight: float) -> None:
        before = rows.get(row, Recorded())
        rows[row] = Recorded(before.total + weight * value if weight else before.total, before.weight + weight)

    @property
    def _row(self) -> int:
        """What the present micro-batch has recorded is added to this row of a name."""
        return 0

    @property
    def _rows(self) -> int:
        return 1

    def _values(self) -> list[float]:
        """The recorded values, by the names that all ranks know."""
        found: list[float] = []
        for name in self._known_names:
            rows = self.recorded.get(name, {})
            for row in range(self._rows):
                if row in rows:
                    found += (*_parts(rows[row].total), *_parts(rows[row].weight))
                else:
                    found += _NOTHING
        return found

    def _take_means(self, values: Sequence[float]) -> None:
        width = len(_NOTHING) * self._rows
        for place, name in enumerate(self._known_names):
            own = values[place * width : (place + 1) * width]
            numbers = [_number(own[i : i + _PARTS]) for i in range(0, width, _PARTS)]
            weight = math.fsum(numbers[1::2])
            if weight > 0:
                self.means[name] = math.fsum(numbers[::2]) / weight
        self.recorded.clear()

    def _values_by_new_names(self) -> list[float]:
        """Have all ranks know all names, and sum the values by them. Collective, once for each new name."""
        collectives = process.current().collectives
        own = "".join(f"{name}\n" for name in self.recorded).encode()
        text = collectives.result(
            collectives.start_gather(torch.tensor(list(own), dtype=torch.uint8), "edl_hvd.recorded_names")
        )
        names = bytes(text.tolist()).decode().split("\n")[:-1]
        self._known_names = sorted({*self._known_names, *names})
        values = torch.tensor(self._values(), dtype=torch.float32)
        collectives.finish([collectives.start_sum(values, "edl_hvd.recorded", 1.0)])
        found: list[float] = values.tolist()
        return found


def _parts(number: float) -> tuple[float, ...]:
    """A number such that float32 holds it, and sums of its like, to the last digit before the point."""
    if not abs(number) < _LARGEST:  # also of NaN
        return (0.0, 0.0, 0.0, number)
    fraction, whole = math.modf(number)
    high, rest = divmod(abs(whole), _HIGH)
    middle, low = divmod(rest, _MIDDLE)
    sign = math.copysign(1.0, number)
    return (sign * high, sign * middle, sign * low, fraction)


def _number(parts: Sequence[float]) -> float:
    high, middle, low, fraction = parts
    return high * _HIGH + middle * _MIDDLE + low + fraction


class _Hooks:
    """On one parameter: before autograd adds to its ``.grad``, and after.

    The first is on the node that adds, not on the parameter: ``torch.autograd.grad`` passes by the node.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        before: Callable[[torch.nn.Parameter], None],
        after: Callable[[torch.nn.Parameter], None],
    ) -> None:
        self._node = _accumulator_of(parameter)
        self._handles = [
            self._node.register_prehook(lambda _: before(parameter)),
            parameter.register_post_accumulate_grad_hook(after),
        ]

    def fits(self, parameter: torch.nn.Parameter) -> bool:
        """Whether autograd still uses the node."""
        return _accumulator_of(parameter) is self._node

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _accumulator_of(parameter: torch.nn.Parameter) -> Any:
    with torch.enable_grad():
        function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]


def _is_nested() -> bool:
    """Whether the backward pass that ends runs inside another, as re-entrant activation checkpointing has it."""
    frame = sys._getframe(1)
    nested = torch.autograd.function.BackwardCFunction.apply.__code__
    current: Any = frame
    while current is not None:
        if current.f_code is nested:
            return True
        current = current.f_back
    return False
