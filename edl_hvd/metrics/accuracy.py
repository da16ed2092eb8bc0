"""The share of samples whose class was among the first guesses."""

from __future__ import annotations

import math

import torch

from edl_hvd.errors import UsageError
from edl_hvd.metrics.metric import Metric
from edl_hvd.metrics.tally import Layout, Tally


class Accuracy(Metric):
    """The number of correct samples over the number of all samples, counted in integers.

    A sample is correct if its class is one of the ``top_k`` with the highest scores; of equal scores the lower class
    comes first. A sample with a NaN among its scores is not correct.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> accuracy.compute()
    0.5

    Args:
        top_k: Number of guesses per sample, at least 1.

    Raises:
        UsageError: ``top_k`` is below 1.
    """

    layout = Layout(sums=2)

    def __init__(self, top_k: int = 1) -> None:
        if top_k < 1:
            raise UsageError(f"Accuracy(top_k={top_k}) has no guess; expected at least 1")
        super().__init__()
        self.top_k = top_k

    @torch.no_grad()
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Count samples. Any rank; not collective; does not wait for a GPU.

        Args:
            preds: Scores (logits or probabilities), any real type, shape [n, classes, ...]; or, with ``top_k=1``,
                classes, integers of shape [n, ...]. On any device.
            target: Correct classes, integers of shape [n, ...] in [0, classes), on the same device.

        Raises:
            UsageError: The shapes or types do not fit together, or there are fewer classes than ``top_k``.
        """
        if preds.shape == target.shape and not preds.is_floating_point():
            if self.top_k > 1:
                raise UsageError(
                    f"Accuracy(top_k={self.top_k}).update got classes as preds, one guess for each sample; expected "
                    "scores of shape [n, classes], or top_k=1"
                )
            hits = preds == target
        else:
            hits = self._hits(preds, target)
        sums = torch.stack([hits.sum(), torch.tensor(hits.numel(), device=hits.device)])
        self._count(Tally(sums, torch.empty(0, dtype=torch.float64, device=hits.device)))

    def _hits(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if preds.dim() < 2 or preds.shape[:1] + preds.shape[2:] != target.shape or target.is_floating_point():
            raise UsageError(
                f"Accuracy.update got preds of shape {tuple(preds.shape)} and {preds.dtype}, target of shape "
                f"{tuple(target.shape)} and {target.dtype}; expected scores of shape [n, classes] and integers "
                "of shape [n], or classes of shape [n] for both"
            )
        classes = preds.shape[1]
        if self.top_k > classes:
            raise UsageError(f"Accuracy(top_k={self.top_k}) got scores of {classes} classes; expected at least as many")
        target = target.unsqueeze(1)
        own = preds.gather(1, target)
        numbers = torch.arange(classes, device=preds.device).view(1, -1, *[1] * (preds.dim() - 2))
        ahead = (preds > own) | ((preds == own) & (numbers < target))
        return (ahead.sum(1) < self.top_k) & ~preds.isnan().any(1)

    def compute(self) -> float:
        """The accuracy of the whole world up to the last commit. Any rank; not collective.

        Returns:
            A number in [0, 1], the same on all ranks; NaN before anything was counted.

        Raises:
            UsageError: This rank has counted outside of any loop, and there was no commit since.
        """
        correct, samples = self._counted().sums.tolist()
        return correct / samples if samples else math.nan

    @property
    def samples(self) -> int:
        """The number of samples that the world has counted up to the last commit."""
        return int(self._counted().sums[1])
