"""Where the script is in its loop over batches: what may act there, and what must wait for the end of the step."""

from __future__ import annotations

from collections import deque

from edl_hvd.errors import UsageError

_LOOPS = 32  # over steps, that are remembered


class Position:
    """The position of this process: written by the loops over batches and steps, read by what a script calls in them.

    Attributes:
        in_batches: The body of ``state.batches`` is running.
        in_step: The body of ``state.steps`` is running.
        in_evaluation: The body of ``state.evaluate`` is running.
        in_micro_batch: A micro-batch is being computed: in the body of ``state.batches``, or of the loop over a step.
        ends_step: The micro-batch is this worker's last of the step.
        per_step: Micro-batches of the global batch; more than 1 means that a body may run several times per step.
        is_even: Every worker computes one micro-batch in this step.
        has_idle: Some worker computes none.
        steps_in_body: Calls of ``optimizer.step()`` in this body.
        is_asked: The script has asked in this body whether it ends the step, and so may do what belongs to a step.
        knows_step: The script has looked, in this loop, at how far the training is.
        left_early: The script has left the loop over a step before its end.
        left_unused: It has left the loop of ``state.batches`` where a step began, without a gradient of it.
        left_inside: It has left the loop of ``state.batches`` between the micro-batches of a step.
        loops: The last loops over a step: the number that autograd gave to the first operation in each, and behind it.
        loop_number: Number of the loop over batches that has begun last.
    """

    def __init__(self) -> None:
        self.loop_number = 0
        self.leave()

    def leave(self) -> None:
        """No loop is under way."""
        self.in_batches = self.in_step = self.in_evaluation = self.in_micro_batch = False
        self.ends_step = True
        self.per_step = 1
        self.is_even = True
        self.has_idle = self.is_asked = self.knows_step = False
        self.steps_in_body = 0
        self.left_early = self.left_inside = self.left_unused = False
        self.loops: deque[tuple[int, int]] = deque(maxlen=_LOOPS)

    @property
    def waits(self) -> bool:
        """What belongs to an optimizer step must not act here: the step's micro-batches are not all computed."""
        return self.in_batches and self.in_micro_batch and not self.ends_step

    def refuse_left_early(self) -> None:
        """Refuse to go on after a loop that the other workers have gone through to its end.

        Raises:
            UsageError: The loop over a step's micro-batches was left early.
        """
        if self.left_inside:
            raise UsageError(
                "the loop of state.batches() was left, by break, return or itertools.islice, between the micro-batches "
                "of a step, whose gradient is not complete; leave it where `optimizer.at_boundary` is true, or decide "
                "by state.step, or write the loop with `for step in state.steps(loader):`"
            )
        if self.left_early:
            raise UsageError(
                "the loop over the micro-batches of a step was left before its end, by break, return or "
                "next(iter(step)), so the step's gradient is not complete; go through all of them (a micro-batch "
                "without backward() adds nothing), or stop at step level, in the body of `for step in "
                "state.steps(loader):`"
            )

    def refuse_in_step(self, call: str) -> None:
        """Refuse what belongs to an optimizer step in the loop over its micro-batches.

        Raises:
            UsageError: A micro-batch is being computed in ``state.steps``.
        """
        if self.in_step and self.in_micro_batch:
            raise UsageError(
                f"{call} was called in the loop over a step's micro-batches, where the gradient is not complete; move "
                "it after that loop, into the body of `for step in state.steps(loader):`"
            )

    def admits_step(self, has_closure: bool) -> bool:
        """Whether an optimizer step acts here; refuses one that would not be that of a global batch.

        Raises:
            UsageError: The step's gradient is not complete, or is never going to be.
        """
        if has_closure and self.in_batches and self.per_step > 1:
            raise UsageError(
                "optimizer.step(closure) was called in the body of state.batches(), where the closure sees one "
                f"micro-batch, and the global batch is {self.per_step}; write the loop with `for step in "
                "state.steps(loader):`, and loop over the step in the closure"
            )
        if self.waits:
            return False
        self.refuse_in_step("optimizer.step()")
        self.refuse_left_early()
        if self.left_unused:
            raise UsageError(
                "optimizer.step() was called behind the loop of state.batches(), which was left before its first "
                "backward(), as next(iter(state.batches(loader))) does; write `for batch in state.batches(loader):`, "
                "and train in its body"
            )
        return True

    def refuse_inside(self, call: str) -> None:
        """Refuse a call that every worker has to make equally often.

        Raises:
            UsageError: A micro-batch is being computed, and workers have different numbers of them.
        """
        if self.in_batches and self.ends_step and self.is_asked and not self.has_idle:
            return
        if self.in_micro_batch and not self.is_even:
            raise UsageError(
                f"{call} was called while a micro-batch is computed, which does not happen equally often on every "
                f"worker (this step has {self.per_step} micro-batches); call it once per step, in `for step in "
                "state.steps(loader):` after the loop over the step, or after the loop over batches"
            )


position = Position()
"""The position of this process."""
