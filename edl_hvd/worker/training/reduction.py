"""When gradients are summed over the world, in rounds that all workers make alike.

Gradient of a step, with micro-batches j of weight w_j, by default their number of samples n_j, and W = sum of w_j:

    g = sum over j of (w_j / W) · g_j,      g_j the gradient of the user's mean loss over micro-batch j

so it equals the gradient of the mean loss over the global batch, for any dealing (``gradient_sum.py``, ``exact.py``).

Until the world has summed it, a gradient is not in ``.grad``, where a script could cut, clear or read a part of it: a
hook (``grad_attribute.py``) takes it from there as soon as backward has finished it. What was in ``.grad`` before is
set aside, and the sum is added to it, as ``backward()`` alone would have done (``grad_attribute.py``). So ``.grad`` is
what PyTorch would have made of the global batch.

A **round** sums what has been computed since the last one. All workers make the same rounds: in ``state.steps`` one
after each loop over a step's micro-batches, elsewhere one at the end of each ``backward()`` that ends a step. A round
has one small message, ``RoundMessage``: who has a gradient of which parameter, how much all micro-batches weigh, and
what each rank votes for at the coming commit. A parameter that nobody has a gradient of is not summed, and its
``.grad`` stays as it is, ``None`` mostly. The sums of the others start as soon as backward has finished them, if it is
known which backward is the last to touch them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.autograd import Variable

from edl_hvd.errors import UsageError
from edl_hvd.worker.position import position
from edl_hvd.worker.training.exact import ExactGradientSum
from edl_hvd.worker.training.grad_attribute import GradAttribute, HookedParameters, is_nested_backward
from edl_hvd.worker.training.gradient_sum import GradientSum
from edl_hvd.worker.training.micro_batch import MicroBatch
from edl_hvd.worker.training.noise import NoiseMeter
from edl_hvd.worker.training.process_group import ProcessGroup
from edl_hvd.worker.training.recorded import RecordedValues
from edl_hvd.worker.training.round_message import RoundMessage, Vote, gradient_flag, is_computed, is_computed_anew
from edl_hvd.worker.training.weak_callbacks import WeakCallbacks


class Reduction:
    """Sums the gradients of all optimizers of a ``State``; an optimizer that is in none has one of its own.

    Args:
        named_parameters: Pairs of name and parameter.
        group: Workers to sum over, until :meth:`bind` names others.
        exact: Whether the bits of the sum must not depend on the world.

    Attributes:
        parameters: Parameters whose gradients are summed.
        names: Their names.
        sum: Sum under way.
        recorded: Values that this rank has recorded.
        is_joined: The optimizers are part of a ``State``.
        has_stepped: An optimizer has stepped since the last commit.
        is_interleaved: In some step there was another round after an optimizer had stepped.
        learning_rate_factor: What the batch policy multiplies the learning rate with in the present step.
        deferred: Rounds are made by the loop over a step, not by ``backward()``.
        vote: Asked for that of this rank, when a round is made: it travels with it.
        answer: The sum of the votes of the last round; ``None`` before the first of a step.
        announces: Before each round the ranks tell each other that it comes, because some have no micro-batch.
        rounds: Rounds since the step began.
        round_number: Of the last round of all.
        step_has_gradient: Some rank has given one in this step.
        skipped: Ranks that have left the body of ``state.batches`` without ``backward()`` in this step.
        on_round: Called after each round.
        paused: Gradients accumulate (``no_sync``).
        noise: Measures how noisy the gradients are; ``None`` where nobody wants to know.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], group: ProcessGroup, exact: bool = False
    ) -> None:
        self.parameters = HookedParameters(self._before_gradient, self._on_gradient)
        self.parameters.adopt(named_parameters)
        self.names = self.parameters.names
        self.sum = (ExactGradientSum if exact else GradientSum)(self.names, group)
        self.recorded = RecordedValues()
        self.is_joined = self.is_interleaved = self.has_stepped = False
        self.learning_rate_factor = 1.0
        self.deferred = self.paused = self.announces = False
        self.vote: Callable[[], Vote] = Vote
        self.answer: Vote | None = None
        self.rounds = self.round_number = self.skipped = 0
        self.step_has_gradient = False  # of any rank
        self.on_round = WeakCallbacks()
        self.noise: NoiseMeter | None = None
        self._grad = GradAttribute(self.names)
        self._has_gradient = False  # of the present micro-batch
        self._fired: dict[torch.nn.Parameter, int] = {}  # gradients of the present micro-batch
        self._expected: dict[int, dict[torch.nn.Parameter, int]] = {}  # the same, last time, of each loop over a step
        self._rounds_of_body = 0  # since the present micro-batch began
        self._loop = 0  # over the micro-batches, in this step
        self._finish_queued = False

    def bind(self, group: ProcessGroup) -> None:
        """Sum over these workers from now on."""
        self.sum.group = group

    @property
    def catalogue(self) -> dict[torch.nn.Parameter, str]:
        """The names of parameters that may come later."""
        return self.parameters.catalogue

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Leave those of these parameters alone."""
        self.parameters.release(parameters)

    def measure_noise(self) -> None:
        """From the next step on, tell how noisy its gradient was (``NoiseMeter.observation``)."""
        if self.noise is None:
            self.noise = NoiseMeter()

    # --- a step ---

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch being computed; ``None`` in a script without ``state.batches`` and ``state.steps``."""
        return self.sum.micro_batch

    @property
    def at_boundary(self) -> bool:
        """Backward now completes a global batch."""
        micro_batch = self.sum.micro_batch
        return micro_batch is None or micro_batch.last

    @property
    def has_computed(self) -> bool:
        """The present micro-batch has given a gradient."""
        return self._has_gradient

    def begin_step(self, announces: bool = False) -> None:
        """A global batch begins. ``announces``: some rank has no micro-batch of it, and the loop is that of batches."""
        self.vote, self.answer, self.announces = Vote, None, announces
        self.rounds = self.skipped = self._loop = 0
        self.recorded.begin_step()
        self.step_has_gradient = self.has_stepped = False
        self.parameters.attach()
        self._begin_round()

    def begin(self, micro_batch: MicroBatch) -> None:
        """The next backward computes this."""
        self._end_micro_batch()
        self._rounds_of_body = 0
        self.sum.begin(micro_batch)
        self._grad.begin_micro_batch()
        if micro_batch.first:
            self.parameters.attach()
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
        self.sum.weigh(weight)

    def record(self, name: str, value: float | torch.Tensor) -> None:
        """Add a value of the present micro-batch to what is averaged over the world by its weight."""
        self.recorded.add(name, value, self.sum.weight, self.sum.row)

    def forget(self) -> None:
        """Drop what is under way: the world it was for is gone, or the loop has ended."""
        self.answer = None
        self.deferred = self.announces = False
        self.vote = Vote
        self.recorded.forget()
        self._grad.forget()
        self.sum.forget()
        if self.noise is not None:
            self.noise.forget()
        self._finish_queued = False

    def forget_world(self) -> None:
        """The next world is another one: what its ranks have in common has to be found out anew."""
        self.forget()
        self.recorded.forget_names()
        self.sum.forget_world()

    def _begin_round(self) -> None:
        self.sum.begin_round()
        self._grad.begin_round()
        self._finish_queued = False

    # --- gradients ---

    def _before_gradient(self, parameter: torch.nn.Parameter, _: object = None) -> None:
        """Autograd is about to add to ``.grad``."""
        if parameter.grad is not None and not self._is_apart:
            self._grad.set_aside(parameter)

    @property
    def _is_apart(self) -> bool:
        """The script computes a gradient beside the loop over a step, as every rank does: it needs no sum."""
        return self.deferred and not position.place.in_micro_batch

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
            self._grad.keep(parameter, gradient)
            if self.at_boundary and count == self._expected.get(self._loop, {}).get(parameter) and not self.paused:
                self._take(parameter)
                self.sum.start_early(parameter, may_grow=True)
            return
        parameter.grad = None
        self._add(parameter, gradient)
        if self.paused or not self.at_boundary:
            return
        self.sum.start_early(parameter, may_grow=False)
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

    def _accept(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Refuse a gradient that cannot be summed, or comes where it must not."""
        if gradient.is_sparse:
            raise UsageError(
                f"the gradient of {self.names[parameter]!r} is sparse, which cannot be summed over a changing world; "
                "build the module with sparse=False"
            )
        if position.place.in_batches and position.per_step > 1 and self.rounds:
            raise UsageError(
                f"backward() computed the gradient of {self.names[parameter]!r} a second time in one body of "
                f"state.batches(), whose global batch is {position.per_step} micro-batches; write the loop with "
                "`for step in state.steps(loader):`, which takes any number of backward passes, or add the losses"
            )
        if not self.is_joined and position.place.in_training:
            raise UsageError(
                f"backward() computed a gradient for {self.names[parameter]!r}, whose DistributedOptimizer State(…) "
                "was not given, so its steps would be lost with a worker; add it: State(optimizer=optimizer, …)"
            )
        self._has_gradient = True

    def _take(self, parameter: torch.nn.Parameter) -> None:
        gradient = self._grad.take(parameter)
        if gradient is not None:
            self._add(parameter, gradient)

    def _end_micro_batch(self) -> None:
        """In the loop over a step ``.grad`` is the gradient of the micro-batch, up to its end."""
        kept = self._grad.kept()
        if kept:
            with torch.no_grad():
                for parameter in kept:
                    self._take(parameter)
        if self.sum.micro_batch is not None and not self._rounds_of_body:
            for parameter, gradient in self._grad.take_assigned():
                self._add(parameter, gradient)

    def _add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient to this rank's part of the round."""
        part = self.sum.add(parameter, gradient)
        if self.noise is not None and part is not None:
            self.noise.small(parameter, part, self.sum.share)

    def _end_backward(self) -> None:
        self._finish_queued = False
        if is_nested_backward():
            raise UsageError(
                "activation checkpointing with use_reentrant=True runs a backward pass inside another, so in "
                "state.batches() nobody can tell when a step's gradient is complete; give checkpoint(…) "
                "use_reentrant=False, or write the loop with `for step in state.steps(loader):`"
            )
        self.complete()

    # --- rounds ---

    @torch.no_grad()
    def complete(self, skipped: bool = False) -> None:
        """Make a round. A collective over the world.

        Args:
            skipped: The script has left the body of ``state.batches`` without ``backward()``.
        """
        self._end_micro_batch()
        self.parameters.refuse_unseen()
        if self.announces:
            self.announce(True)
        if self.sum.group.size == 1:
            self._complete_alone()
        else:
            self._complete_together(skipped)
        if self.deferred:
            self._expected[self._loop] = dict(self._fired)
            self._loop += 1
        self.is_interleaved |= self.has_stepped
        self.rounds += 1
        self._rounds_of_body += 1
        self.round_number += 1
        self._begin_round()
        self.on_round.call()

    def _complete_alone(self) -> None:
        self.answer = self.vote()
        self.recorded.take_alone(self.sum.rows)
        used = self.sum.present()
        self._sum(used, self.sum.total_weight, is_late=False)

    def _complete_together(self, skipped: bool) -> None:
        total = self._exchange(skipped)
        self.answer = total.vote
        self.skipped += round(total.skipped)
        flags = dict(zip(self.names, total.gradients, strict=True))
        for parameter, flag in flags.items():
            # Where the script has cleared it before it computed one, it is so on the ranks that computed none, too.
            if is_computed_anew(flag):
                self._grad.clear(parameter)
        used = [parameter for parameter, flag in flags.items() if is_computed(flag)]
        self._sum(used, total.weight, total.late > 0)

    def _exchange(self, skipped: bool) -> RoundMessage:
        """Tell the other ranks of this one, and hear of all of them together. Collective; blocks."""
        collectives, rows = self.sum.group.collectives, self.sum.rows
        present = set(self.sum.present())
        own = RoundMessage(
            vote=self.vote(),
            skipped=float(skipped),
            late=float(self.sum.is_late),
            unnamed=float(self.recorded.is_unnamed),
            weight=self.sum.total_weight,
            recorded=self.recorded.numbers(rows),
            gradients=[gradient_flag(p in present, self._grad.was_set(p)) for p in self.names],
        )
        tensor = own.to_tensor()
        collectives.finish([collectives.start_sum(tensor, "edl_hvd.flags", 1.0)])
        total = RoundMessage.from_tensor(tensor, len(self.names))
        values = self.recorded.sums_by_new_names(rows, collectives) if total.unnamed else total.recorded
        self.recorded.take(values, rows)
        return total

    def _sum(self, used: list[torch.nn.Parameter], weight: float, is_late: bool) -> None:
        """Sum the gradients, and make the sums the parameters' gradients.

        Args:
            used: Parameters that some rank has a gradient of; the same on every rank.
            weight: Weight W of all micro-batches, over all ranks.
            is_late: Some rank has gradients that came after their sums had started.
        """
        self.sum.start(used)
        measured = self.noise.start(self.sum.group.collectives) if self.noise is not None else []
        self._publish(self.sum.finish(used, weight, is_late, measured))

    def _publish(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        self.step_has_gradient |= bool(sums)
        if self.noise is not None:
            self.noise.large(sums.values())
        self._grad.publish(sums)

    # --- steps in which some ranks have no micro-batch ---

    def announce(self, comes: bool, leaves: bool = False) -> tuple[bool, bool]:
        """Tell the other ranks whether this one makes another round in this step, or leaves the loop. Collective.

        Returns:
            Whether any makes another round, and whether any leaves.
        """
        word = torch.tensor([float(comes), float(leaves)])
        collectives = self.sum.group.collectives
        collectives.finish([collectives.start_sum(word, "edl_hvd.announce", 1.0)])
        coming, leaving = word.tolist()
        return coming > 0, leaving > 0

    def join_with_zeros(self, leaves: bool = False) -> bool:
        """Make the rounds that the others make in this step, with a share of nothing; whether any leaves the loop."""
        while True:
            comes, anybody_leaves = self.announce(False, leaves)
            if not comes:
                return anybody_leaves
            self.announces = False
            self.complete()
            self.announces = True
