"""Tensors that Horovod's thread works with, lent so that it never needs Python's lock.

It would, to let go of a tensor to which otherwise only a Python object refers, and may do so a little after the
collective's end. Two threads suffer:

- one that queues collectives: Horovod's thread, giving up, lets go of all it was handed while it holds the lock that
  queueing waits for, and Python's lock is held then;
- one that forks, as a data loader does for its processes: Python before 3.11.8 takes a lock along that Horovod's
  thread holds for a moment while it asks, and the new process waits for it for ever (python/cpython#112275).
"""

from __future__ import annotations

import torch


class Loans:
    """A view refers to each tensor from C++ until Horovod's thread has let go of it."""

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to hand to Horovod at once: the same memory, in a tensor that nobody else knows."""
        lent = tensor.detach()
        view = lent.view(lent.shape)
        self._lent.append((lent, view, _references(lent)))
        return lent

    def settle(self) -> None:
        """Forget what Horovod's thread has let go of. Does not wait for it."""
        self._lent = [loan for loan in self._lent if _references(loan[0]) > loan[2]]


def _references(tensor: torch.Tensor) -> int:
    """From C++, the Python object counting as one. Older torch does not tell: a loan is settled at the next chance."""
    return tensor._use_count() if hasattr(tensor, "_use_count") else 0
