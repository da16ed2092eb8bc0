"""Mean and sum."""

from __future__ import annotations

import functools

import torch

from edl_hvd.errors import UsageError
from edl_hvd.metrics.exact_sum import WORDS, carried, exact_sum, ratio_of, value_of
from edl_hvd.metrics.metric import Metric
from edl_hvd.metrics.tally import Layout, Tally

Number = float | torch.Tensor


class Mean(Metric):
    """The weighted mean of all values: the float64 nearest to sum(weight · value) / sum(weight).

    Sums are kept without rounding, so the mean does not depend on order, micro-batches or world; only each product is
    rounded, to float64.

    >>> loss = Mean()
    >>> loss.update(2.0, weight=30)
    >>> loss.update(torch.tensor(4.0), weight=10)
    >>> loss.compute()
    2.5
    """

    layout = Layout(sums=2 * WORDS)

    def update(self, value: Number, weight: Number = 1.0) -> None:
        """Count values. Any rank; not collective; does not wait for a GPU.

        Args:
            value: A number, or a tensor of any real type, shape and device, at most 2**28 elements: the mean loss over
                a batch, or a loss per sample. It is converted to float64.
            weight: Weight of each value, such as the number of samples that a mean is over: a number, or a tensor of
                any real type and device that broadcasts to the shape of ``value``.

        Raises:
            UsageError: The shapes do not fit together.
        """
        values = _tensor(value).double()
        if isinstance(weight, torch.Tensor):
            weights = _expanded(weight.detach().to(values.device, torch.float64), values.shape)
            of_weights = exact_sum(weights)
            products = values * weights
        else:
            of_weights = _words_of(float(weight), values.device) * values.numel()
            products = values if weight == 1 else values * float(weight)
        sums = torch.cat([exact_sum(products), of_weights])
        self._count(Tally(sums, _nothing(values), summands=values.numel()))

    def compute(self) -> float:
        """The mean of the whole world up to the last commit. Any rank; not collective.

        Returns:
            A number, the same on all ranks; NaN before anything was counted.

        Raises:
            UsageError: This rank has counted outside of any loop, and there was no commit since.
        """
        sums = self._counted().sums
        return ratio_of(sums[:WORDS], sums[WORDS:])

    def _compacted(self, tally: Tally) -> Tally:
        tally.sums = carried(tally.sums.view(2, WORDS)).view(-1)
        return tally


class Sum(Metric):
    """The sum of all values: the float64 nearest to it, in any order of the values.

    >>> total = Sum()
    >>> total.update(torch.tensor([0.1, 0.2], dtype=torch.float64))
    >>> total.update(-0.3)
    >>> total.compute()  # 0.1, 0.2 and 0.3 are not quite that in binary; the rest is exact
    2.7755575615628914e-17
    """

    layout = Layout(sums=WORDS)

    def update(self, value: Number) -> None:
        """Count values. Any rank; not collective; does not wait for a GPU.

        Args:
            value: A number, or a tensor of any real type, shape and device, at most 2**28 elements. It is converted to
                float64.
        """
        values = _tensor(value)
        self._count(Tally(exact_sum(values), _nothing(values), summands=values.numel()))

    def compute(self) -> float:
        """The sum of the whole world up to the last commit. Any rank; not collective.

        Returns:
            A number, the same on all ranks; 0 before anything was counted.

        Raises:
            UsageError: This rank has counted outside of any loop, and there was no commit since.
        """
        return value_of(self._counted().sums)

    def _compacted(self, tally: Tally) -> Tally:
        tally.sums = carried(tally.sums)
        return tally


def _expanded(weights: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    try:
        return weights.expand(shape)
    except RuntimeError:
        raise UsageError(
            f"Mean.update got values of shape {tuple(shape)} and weights of shape {tuple(weights.shape)}; expected one "
            "weight for all, or one for each value"
        ) from None


@functools.lru_cache(maxsize=64)
def _words_of(weight: float, device: torch.device) -> torch.Tensor:
    """A loop has few weights: the samples of a batch, and of the last one."""
    return exact_sum(torch.tensor(weight, dtype=torch.float64, device=device))


def _tensor(value: Number) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _nothing(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float64, device=values.device)
