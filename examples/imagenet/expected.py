"""What the demo promises of a run, held against its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from demos import Promise
from report import Report, arrows, final_top1, sizes_of


@dataclass(frozen=True)
class ExpectedRun:
    """What is expected of a run.

    Attributes:
        epochs: Number of epochs of the run.
        samples_per_epoch: Number of samples in each.
        sizes: Number of workers in each world, first to last.
        lost, left: Workers that die or leave, as ``host:local_rank``, in order.
        top1: Least accuracy of the last validation in [0, 1]; ``None`` for any.
    """

    epochs: int
    samples_per_epoch: int
    sizes: tuple[int, ...]
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    top1: float | None = None


def check_run(report: Report, expected: ExpectedRun) -> list[Promise]:
    """Each promise, with what the report says of it."""
    epochs, trained = expected.epochs, report.samples_per_epoch
    wanted = dict.fromkeys(range(epochs), expected.samples_per_epoch)
    other = [f"{trained.get(epoch, 0):,} in epoch {epoch + 1}" for epoch in sorted({*wanted, *trained})
             if trained.get(epoch, 0) != wanted.get(epoch, 0)]  # fmt: skip
    lost = tuple(name for resize in report.resizes for name in resize.lost)
    left = tuple(name for resize in report.resizes for name in resize.left)
    top1 = f"at least {expected.top1:.0%}" if expected.top1 is not None else "nothing on this data"
    return [
        Promise(f"validation accuracy, top-1: {top1}", f"{final_top1(report):.2%}",
                expected.top1 is None or final_top1(report) >= expected.top1),
        Promise(f"samples trained per epoch: {expected.samples_per_epoch:,} in each of {epochs}",
                ", ".join(other) or f"{expected.samples_per_epoch:,} in each of {epochs}", not other),
        Promise(f"workers: {arrows(expected.sizes)}", arrows(sizes_of(report)), sizes_of(report) == expected.sizes),
        Promise(f"a worker dies: {names(expected.lost)}", names(lost), lost == expected.lost),
        Promise(f"a worker leaves: {names(expected.left)}", names(left), left == expected.left),
        Promise("the job comes to its end", f"{report.duration_s:.0f} s", report.ended),
    ]  # fmt: skip


def names(workers: Iterable[str]) -> str:
    """Workers as text."""
    return ", ".join(workers) or "none"
