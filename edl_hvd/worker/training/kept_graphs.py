"""Losses that a script keeps from the loop over a step, to call ``backward()`` for them behind it.

Every worker has other micro-batches, and behind the loop nothing is summed any more, so each would move its weights in
a direction of its own. A gradient comes to its parameter without a word on what it was computed from: who calls
``backward()`` has to be looked at, and the graph that it goes through. Autograd numbers the operations in it as they
are made, so those of a loop are those numbered between its beginning and its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from edl_hvd.compat import patching
from edl_hvd.errors import UsageError
from edl_hvd.worker.position import LoopPlace, position

next_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""What autograd gives to the next operation of this thread. Private to torch: where it is gone, nothing is refused."""


def _refuse_kept(roots: Sequence[Any]) -> None:
    # A root is a tensor or an edge of a graph, which has a node.
    is_missing = position.has_idle and not any(getattr(root, "requires_grad", True) for root in roots)
    if is_missing or _is_made_in(position.loops, [getattr(root, "grad_fn", None) or _node_of(root) for root in roots]):
        raise UsageError(
            "backward() was called outside the loop over the step's micro-batches for a loss that was computed in it, "
            "of which every worker has others; call backward() in the body of `for batch in step:`, where each "
            "micro-batch's gradient is weighed and summed over the workers"
        )


def _node_of(root: Any) -> Any:
    return getattr(root, "node", None)


def _is_made_in(loops: Sequence[tuple[int, int]], nodes: list[Any]) -> bool:
    """Whether a backward pass from these nodes goes through an operation of one of the loops."""
    first = min((begin for begin, _ in loops), default=0)
    seen = set()
    while nodes:
        node = nodes.pop()
        number = getattr(node, "_sequence_nr", lambda: -1)()
        # What an operation is made of has smaller numbers. That of a leaf is none.
        if number < first or node in seen or hasattr(node, "variable"):
            continue
        if any(begin <= number < end for begin, end in loops):
            return True
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return False


def _watched(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if position.place is LoopPlace.STEP:
            is_one = isinstance(tensors, torch.Tensor) or _node_of(tensors) is not None
            tensors = tensors if is_one else list(tensors)
            _refuse_kept([tensors] if is_one else tensors)
        backward(tensors, *args, **kwargs)

    return watched


# For the whole process; Tensor.backward() calls it, too.
patching.replace("backward", torch.autograd, "backward", _watched)
