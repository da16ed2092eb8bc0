"""A copy that is made in portions by whoever has time: a thread beside the batch, and the worker that waits for it.

Of what is left, the next who comes takes the half (guided self-scheduling, Polychronopoulos and Kuck, IEEE Transactions
on Computers 1987, for two). So a thread that is alone asks for Python's lock a dozen times, and two end together.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection
from itertools import accumulate

import torch

_LEAST_BYTES = 1024 * 1024
# Of a portion: copied in a tenth of a millisecond, a few times as long as it takes to have the next one.
_LARGE_BYTES, _LARGE_PART = 4 * 1024 * 1024, 64
# A tensor of more than both this size and this part of all bytes is dealt out in blocks: there are few of them.

Portion = tuple[list[torch.Tensor], list[torch.Tensor]]


class Blocks:
    """Memory for copies, cut into blocks that are dealt out; the same for every copy into it.

    Args:
        targets: It; without gaps.

    Attributes:
        into: The blocks.
        ends: Bytes up to the end of each.
    """

    def __init__(self, targets: Collection[torch.Tensor]) -> None:
        block_bytes = max(_LARGE_BYTES, sum(target.nbytes for target in targets) // _LARGE_PART)
        self._rows = {
            number: max(1, block_bytes * len(target) // target.nbytes)
            for number, target in enumerate(targets)
            if target.nbytes > block_bytes and target.dim()
        }
        self.into = self.cut(targets)
        self.ends = list(accumulate(block.nbytes for block in self.into))

    def cut(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the same shapes, cut like the targets: each whole, or by rows where it is large."""
        if not self._rows:
            return list(tensors)
        blocks: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            rows = self._rows.get(number)
            blocks += tensor.detach().split(rows) if rows else [tensor]
        return blocks


class LateCopy:
    """A copy of some tensors into others of the same shapes. Every method may be called from any thread.

    Args:
        tensors: Tensors to copy.
        blocks: Memory to copy them to.
        is_disturbed: Tells whether the script has moved the tensors meanwhile. Asked once, when all is copied, or by
            the caller of ``complete``.
    """

    def __init__(self, tensors: Collection[torch.Tensor], blocks: Blocks, is_disturbed: Callable[[], bool]) -> None:
        self._from, self._into, self._ends = blocks.cut(tensors), blocks.into, blocks.ends
        self._is_disturbed = is_disturbed
        self._changed = threading.Condition()
        self._next = 0  # block that nobody has taken
        self._in_hand: dict[int, Portion] = {}  # by thread
        self._made = self._torn = False
        self._looked = False

    def complete(self, is_whole: bool | None = None) -> bool:
        """Return when all is copied, having copied what nobody else did; false if it is of no use.

        Args:
            is_whole: Whether nobody has moved the tensors yet, where the caller has just looked, and moves them when
                this returns. ``None``: it has not looked.
        """
        me = threading.get_ident()
        if is_whole is not None:
            with self._changed:
                self._looked, self._torn = True, self._torn or not (is_whole or self._made)
        try:
            while portion := self._take(me):
                _copy(portion)
                self._in_hand.pop(me)
        finally:
            with self._changed:
                # Nobody waits for one who was interrupted.
                self._torn = self._in_hand.pop(me, None) is not None or self._torn
                self._end_if_over()
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            return not self._torn

    def _take(self, me: int) -> Portion | None:
        with self._changed:
            first, last = self._next, len(self._into)
            if first == last:
                return None
            taken_bytes = self._ends[first - 1] if first else 0
            wanted_bytes = max(_LEAST_BYTES, (self._ends[-1] - taken_bytes) // 2)
            stop = min(bisect_left(self._ends, taken_bytes + wanted_bytes, first) + 1, last)
            portion = self._in_hand[me] = self._from[first:stop], self._into[first:stop]
            self._next = stop
            return portion

    def _end_if_over(self) -> None:
        if not self._made and not self._in_hand and self._next == len(self._into):
            # Afterwards: what is found undisturbed was so all along.
            self._torn = self._torn or (not self._looked and self._is_disturbed())
            self._made = True
            self._changed.notify_all()


@torch.no_grad()
def _copy(portion: Portion) -> None:
    tensors, into = portion
    torch._foreach_copy_(into, tensors)
