"""Metrics whose value does not depend on the world: each sample counts once, through resizes, deaths and restores.

Reading order: ``exact_sum`` (sums without rounding), ``tally`` (what is counted), ``metric`` (what all metrics do),
then ``sums``, ``extremes``, ``accuracy`` and ``auc``.
"""

from __future__ import annotations

from edl_hvd.metrics.accuracy import Accuracy
from edl_hvd.metrics.auc import AUC
from edl_hvd.metrics.extremes import Max, Min
from edl_hvd.metrics.metric import Metric
from edl_hvd.metrics.sums import Mean, Sum

__all__ = ["AUC", "Accuracy", "Max", "Mean", "Metric", "Min", "Sum"]
