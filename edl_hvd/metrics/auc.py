"""The area under the receiver operating characteristic of a binary classifier."""

from __future__ import annotations

import math

import torch

from edl_hvd.errors import UsageError
from edl_hvd.metrics.metric import Metric
from edl_hvd.metrics.tally import Layout, Tally, in_bytes, of_bytes


class AUC(Metric):
    """The chance that a positive sample's score is above a negative one's; equal scores count half.

    AUC = (sum over positives i and negatives j of [s_i > s_j] + [s_i = s_j] / 2) / (P · N)

    with P positives and N negatives: the Mann-Whitney statistic (Hanley and McNeil 1982), computed in integers from the
    sorted scores. It is scikit-learn's ``roc_auc_score``.

    Every rank holds the score and the class of every sample, 9 bytes each, and the commit as much again: 100,000
    samples are 2 MB. Meant for evaluations.

    >>> auc = AUC()
    >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> auc.compute()
    0.75
    """

    layout = Layout(row_bytes=9)

    @torch.no_grad()
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Count samples. Any rank; not collective; does not wait for a GPU.

        Args:
            preds: Scores, any floating-point type, shape [n], on any device: the higher, the likelier positive.
            target: Classes, shape [n] on the same device: 0 or 1 of any type, or booleans.

        Raises:
            UsageError: The shapes or types do not fit together.
        """
        if preds.dim() != 1 or preds.shape != target.shape or not preds.is_floating_point():
            raise UsageError(
                f"AUC.update got preds of shape {tuple(preds.shape)} and {preds.dtype}, target of shape "
                f"{tuple(target.shape)}; expected floating-point scores of shape [n] and classes of shape [n], such as "
                "preds=logits[:, 1] - logits[:, 0]"
            )
        # What is neither 0 nor 1 has to be seen later: telling now would wait for a GPU.
        known = (target == 0) | (target == 1)
        classes = torch.where(known, target, 2).to(torch.uint8)
        rows = in_bytes([preds.double(), classes])
        empty = torch.empty(0, dtype=torch.int64, device=rows.device)
        self._count(Tally(empty, empty.double(), [rows]))

    def compute(self) -> float:
        """The area for the whole world up to the last commit. Any rank; not collective.

        Returns:
            A number in [0, 1], the same on all ranks; NaN where there are no positives, no negatives, or a NaN among
            the scores.

        Raises:
            UsageError: A class was neither 0 nor 1; or this rank has counted outside of any loop, and there was no
                commit since.
        """
        rows = self._counted().all_rows(self.layout)
        scores, classes = of_bytes(rows, 0, torch.float64), of_bytes(rows, 8, torch.uint8)
        if (classes > 1).any():
            raise UsageError(
                f"AUC got {int((classes > 1).sum())} classes that are neither 0 nor 1; expected target to say whether "
                "each sample is positive, such as target == 1"
            )
        positives = int(classes.sum())
        negatives = len(classes) - positives
        if positives == 0 or negatives == 0 or bool(scores.isnan().any()):
            return math.nan
        _, group = torch.unique(scores, return_inverse=True)  # by rising score
        of_groups = torch.zeros((2, int(group.max()) + 1), dtype=torch.int64)
        of_groups.view(-1).index_add_(0, classes.long() * of_groups.shape[1] + group, torch.ones_like(group))
        negative, positive = of_groups
        below = negative.cumsum(0) - negative
        wins_twice = int((positive * (2 * below + negative)).sum())
        return wins_twice / (2 * positives * negatives)
