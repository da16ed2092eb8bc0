"""The loops over batches that a script writes, and in which order they deal, compute, count and commit.

``steps`` is the loop over optimizer steps: its body runs once per step on every worker, and a loop inside it goes over
the worker's micro-batches. ``batches`` is the flat form, whose body runs once per micro-batch: what belongs to a step
waits for the body that ends it (``position.py``), and what cannot be told apart is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edl_hvd.data.sampler import GlobalStep
from edl_hvd.worker.position import position
from edl_hvd.worker.training.body_watch import BodyWatch
from edl_hvd.worker.training.epoch_loop import FLAT, EpochLoop
from edl_hvd.worker.training.micro_batch import MicroBatch
from edl_hvd.worker.training.step import Step

if TYPE_CHECKING:
    from edl_hvd.worker.runtime import Runtime


def steps(runtime: Runtime, loader: Any) -> Iterator[Step]:
    """See :meth:`edl_hvd.State.steps`."""
    loop = EpochLoop.of(runtime, loader, "state.steps()")
    if loop.is_over():
        return
    attempt = loop.begin()
    loop.reduction.deferred = True
    for global_step, items in loop.global_steps():
        loop.place(global_step)
        position.in_step = True
        loop.begin_step(global_step)
        loop.seed_step(global_step, 0)
        runtime.schedulers_may_move()
        step = Step(loop, runtime.store.step, global_step, items)
        try:
            yield step
        except GeneratorExit:
            # The script left its loop early. One that ended as its world broke belongs to an earlier attempt.
            if runtime.attempt == attempt:
                loop.leave()
                if step.was_gone_through:
                    loop.count(global_step)
            raise
        position.refuse_left_early()
        position.in_step = False
        step.end()
        loop.count(global_step)
        loop.commit()
    loop.end()


def batches(runtime: Runtime, loader: Any) -> Iterator[Any]:
    """See :meth:`edl_hvd.State.batches`."""
    loop = EpochLoop.of(runtime, loader, FLAT)
    if loop.is_over():
        return
    attempt = loop.begin()
    watch = BodyWatch(runtime)
    trains = None
    for global_step, items in loop.global_steps():
        has_idle = loop.place(global_step)
        loop.begin_step(global_step, announces=has_idle)
        loop.buffers.begin_step()
        for part in loop.parts(global_step):
            item = loop.next_item(items)
            position.in_batches, position.ends_step = True, part.last
            loop.begin_micro_batch(part, global_step, 0)
            watch.begin()
            try:
                yield item
            except GeneratorExit as left:
                if runtime.attempt == attempt:
                    _leave_body(loop, part, global_step, is_meant=left.__context__ is None)
                raise
            watch.end(sys._getframe(1), part.first)
            position.in_micro_batch = position.in_batches = False
            loop.buffers.end_pass()
        position.in_batches = False
        others_leave = loop.join_others(global_step, has_idle)
        trains = trains or loop.reduction.step_has_gradient
        loop.buffers.end_step()
        loop.count(global_step)
        if others_leave:
            loop.leave()
            return
        loop.commit()
    if trains is False:
        runtime.warn_once(
            "untrained",
            "state.batches() has come to the end of the epoch, and no backward() was called in its body, so nothing "
            "was learned from these samples; train in the body itself (list(…) goes through all batches before)",
        )
    loop.end()


def _leave_body(loop: EpochLoop, part: MicroBatch, global_step: GlobalStep, is_meant: bool) -> None:
    """The script has left the loop of ``batches`` in its body.

    Args:
        loop: Loop that was left.
        part: Micro-batch of the body.
        global_step: Step of the micro-batch.
        is_meant: Whether the script has left it by itself, and not by an error, which the other ranks do not share.
    """
    reduction, runtime = loop.reduction, loop.runtime
    loop.buffers.end_pass()
    if part.last and reduction.rounds:
        try:
            if is_meant:
                loop.join_others(global_step, position.has_idle, leaves=True)
            loop.buffers.end_step()
            loop.count(global_step)
        except Exception as error:  # a loop that is left cannot raise it
            runtime.failure = error
    is_unused = part.first and not reduction.has_computed
    is_inside = not (is_unused or part.last)
    if is_meant and not is_inside:
        loop.tell_of_leaving()
    loop.leave()
    position.left_unused, position.left_inside = is_meant and is_unused, is_meant and is_inside
