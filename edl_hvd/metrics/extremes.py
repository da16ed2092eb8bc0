"""Largest and smallest value."""

from __future__ import annotations

import torch

from edl_hvd.errors import UsageError
from edl_hvd.metrics.metric import Metric
from edl_hvd.metrics.tally import Layout, Tally


class Max(Metric):
    """The largest of all values; NaN if one of them is.

    >>> worst = Max()
    >>> worst.update(torch.tensor([1.0, 7.0]))
    >>> worst.update(3.0)
    >>> worst.compute()
    7.0
    """

    layout = Layout(largest=1)
    _sign = 1.0

    def update(self, value: float | torch.Tensor) -> None:
        """Count values. Any rank; not collective; does not wait for a GPU.

        Args:
            value: A number, or a tensor of any real type, shape and device with at least one element. It is compared in
                float64.

        Raises:
            UsageError: The tensor is empty.
        """
        values = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
        if values.numel() == 0:
            raise UsageError(f"{type(self).__name__}.update got an empty tensor; expected at least one value")
        largest = (values.double() * self._sign).max().reshape(1)
        self._count(Tally(torch.empty(0, dtype=torch.int64, device=values.device), largest))

    def compute(self) -> float:
        """The largest (for ``Min``: smallest) value of the whole world up to the last commit.

        Any rank; not collective.

        Returns:
            A number, the same on all ranks. Before anything was counted -infinity, for ``Min`` +infinity.

        Raises:
            UsageError: This rank has counted outside of any loop, and there was no commit since.
        """
        return float(self._counted().largest) * self._sign


class Min(Max):
    """The smallest of all values; NaN if one of them is.

    >>> best = Min()
    >>> best.update(torch.tensor([1.0, 7.0]))
    >>> best.compute()
    1.0
    """

    _sign = -1.0
