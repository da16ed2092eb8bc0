"""Momentum that has the learning rate in it is corrected when the policy's factor changes abruptly.

Two forms of SGD with momentum are in use (Goyal et al. 2017, arXiv:1706.02677, section 3, equations 9 and 10):

    u = m u + g,      w = w - η u            torch.optim.SGD, RMSprop, and most others
    v = m v + η g,    w = w - v              some optimizers of other packages, LARS as published

They are the same while the rate η stays. When it changes, the first form needs nothing: u is made of gradients alone,
and the new rate acts on all of it. In the second, v still has the old rate in it, and to remain the same as the first
it has to be multiplied with new / old, the *momentum correction*; the smaller the old rate, the less stable without.
Adam and its kin need none either: their moments are made of gradients alone.

The factor that a velocity was made with stands beside it in the optimizer's state, so wherever the one goes, or stays,
the other does: a commit, a checkpoint, a newcomer that repeats steps, a step that is not made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Of a parameter group: the policy's factor for this step. Of a parameter's state: that of the last step.
FACTOR = "edl_hvd_factor"


@torch.no_grad()
def correct(optimizer: torch.optim.Optimizer, velocity: str) -> None:
    """Before a step: bring all velocities to the rate of this step.

    Args:
        optimizer: Whose groups have this step's ``FACTOR``.
        velocity: The name of the tensor in its state that has the rate in it.
    """
    for factor, kept in _kept(optimizer, velocity):
        before = kept.get(FACTOR, factor)
        if before != factor:
            kept[velocity].mul_(factor / before)


def note(optimizer: torch.optim.Optimizer, velocity: str) -> None:
    """After a step: keep what its velocities were made with."""
    for factor, kept in _kept(optimizer, velocity):
        kept[FACTOR] = factor


def _kept(optimizer: torch.optim.Optimizer, velocity: str) -> Iterator[tuple[float, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter)
            if kept and isinstance(kept.get(velocity), torch.Tensor):
                yield group[FACTOR], kept
