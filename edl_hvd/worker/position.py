"""Where the script is in its loop over batches: what may act there, and what must wait for the end of the step."""

from __future__ import annotations

from collections import deque
from enum import Enum

from edl_hvd.errors import UsageError

_LOOPS = 32  # over steps, that are remembered


class LoopPlace(Enum):
    """The part of the script that is running. Hot code reads the attributes, which cost less than a comparison.

    Attributes:
        in_batches: Whether it is the body of ``state.batches``.
        in_step: Whether it is the body of ``state.steps``.
        in_training: Whether it is one of the two.
        in_micro_batch: Whether it computes a micro-batch: in the body of ``state.batches``, or in the loop over a step.
        in_evaluation: Whether it is the loop of ``state.evaluate``.
    """

    OUTSIDE = "", False  # no loop is under way, or one is between two of its bodies
    BATCHES = "batches", True  # the body of state.batches, which computes a micro-batch
    STEP = "steps", False  # the body of state.steps, outside the loop over its step
    MICRO_BATCH = "steps", True  # the loop over a step of state.steps
    EVALUATION = "evaluate", False  # state.evaluate

    def __init__(self, loop: str, in_micro_batch: bool) -> None:
        self.in_batches = loop == "batches"
        self.in_step = loop == "steps"
        self.in_training = self.in_batches or self.in_step
        self.in_micro_batch = in_micro_batch
        self.in_evaluation = loop == "evaluate"


class LeftLoop(Enum):
    """How the script has left a loop. After all but ``NOT``, ``optimizer.step()`` outside the loop is refused."""

    NOT = "left at its end, or where a step ended"
    EARLY = "left the loop over a step before its end"
    UNUSED = "left the loop of state.batches where a step began, without a gradient of it"
    INSIDE = "left the loop of state.batches between the micro-batches of a step"


class Position:
    """The position of this process: written by the loops over batches and steps, read by what a script calls in them.

    Attributes:
        place: Part of the script that is running.
        ends_step: Whether the micro-batch is this worker's last of the step.
        per_step: Micro-batches of the global batch; more than 1 means that a body may run several times per step.
        is_even: Whether every worker computes one micro-batch in this step.
        has_idle: Whether some worker computes none.
        steps_in_body: Calls of ``optimizer.step()`` in this body.
        is_asked: Whether the script has read ``at_boundary`` of an optimizer in this body; then it may do what belongs
            to a step where that is true.
        knows_step: Whether the script has read ``state.step``, or ``at_boundary`` of an optimizer, in this loop.
        left: How the script has left a loop.
        loops: Last loops over a step: autograd's number of the first operation in each, and of the first one after it.
        loop_number: Number of the loop over batches that has begun last.
    """

    def __init__(self) -> None:
        self.loop_number = 0
        self.leave()

    def leave(self) -> None:
        """No loop is under way."""
        self.place = LoopPlace.OUTSIDE
        self.ends_step = True
        self.deal(1, 1, 1)
        self.is_asked = self.knows_step = False
        self.steps_in_body = 0
        self.left = LeftLoop.NOT
        self.loops: deque[tuple[int, int]] = deque(maxlen=_LOOPS)

    def deal(self, per_step: int, here: int, size: int) -> None:
        """Note how the micro-batches of a step are dealt out to the workers.

        Args:
            per_step: Micro-batches of a whole global batch, at least 1.
            here: Micro-batches of this step, which may be the last and shorter one of an epoch, at least 1.
            size: Workers of the world.
        """
        self.per_step = per_step
        self.is_even = here == size and per_step <= size
        self.has_idle = here < size

    def enter_batch(self, ends_step: bool) -> None:
        """The body of ``state.batches`` is about to run.

        Args:
            ends_step: Its micro-batch is this worker's last of the step.
        """
        self.place = LoopPlace.BATCHES
        self.ends_step = ends_step
        self.is_asked = False
        self.steps_in_body = 0

    @property
    def waits(self) -> bool:
        """Whether what belongs to an optimizer step has to wait: not all micro-batches of the step are computed."""
        return self.place.in_batches and not self.ends_step

    def refuse_left_early(self) -> None:
        """Refuse to go on after a loop that the other workers have gone through to its end.

        Raises:
            UsageError: The loop over a step's micro-batches was left early.
        """
        if self.left is LeftLoop.INSIDE:
            raise UsageError(
                "the loop of state.batches() was left, by break, return or itertools.islice, between the micro-batches "
                "of a step, whose gradient is not complete; leave it where `optimizer.at_boundary` is true, or decide "
                "by state.step, or write the loop with `for step in state.steps(loader):`"
            )
        if self.left is LeftLoop.EARLY:
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
        if self.place is LoopPlace.MICRO_BATCH:
            raise UsageError(
                f"{call} was called in the loop over a step's micro-batches, where the gradient is not complete; move "
                "it after that loop, into the body of `for step in state.steps(loader):`"
            )

    def admits_step(self, has_closure: bool) -> bool:
        """Whether an optimizer step acts here; refuses one that would not be that of a global batch.

        Raises:
            UsageError: The step's gradient is not complete, or is never going to be.
        """
        if has_closure and self.place.in_batches and self.per_step > 1:
            raise UsageError(
                "optimizer.step(closure) was called in the body of state.batches(), where the closure sees one "
                f"micro-batch, and the global batch is {self.per_step}; write the loop with `for step in "
                "state.steps(loader):`, and loop over the step in the closure"
            )
        if self.waits:
            return False
        self.refuse_in_step("optimizer.step()")
        self.refuse_left_early()
        if self.left is LeftLoop.UNUSED:
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
        if self.place.in_batches and self.ends_step and self.is_asked and not self.has_idle:
            return
        if self.place.in_micro_batch and not self.is_even:
            raise UsageError(
                f"{call} was called while a micro-batch is computed, which does not happen equally often on every "
                f"worker (this step has {self.per_step} micro-batches); call it once per step, in `for step in "
                "state.steps(loader):` after the loop over the step, or after the loop over batches"
            )


position = Position()
"""The position of this process."""
