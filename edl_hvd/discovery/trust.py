"""When hosts count as gone: one rule for polls, for the parts of a union and for ``edlrun``. Pure.

One answer that lacks hosts may be a fault of the cloud; a second one in a row, a refresh later, is believed. A failure
is no answer: the count starts again after it.
"""

from __future__ import annotations

from collections.abc import Sequence

IN_A_ROW = 2


def is_believed(answers: int) -> bool:
    """Whether a host is gone that N answers in a row have lacked."""
    return answers >= IN_A_ROW


def empty_in_a_row(before: int, hosts: Sequence[object] | None) -> int:
    """The number of answers in a row without a host, after one more answer; ``None`` stands for a failure.

    >>> empty_in_a_row(1, ()), empty_in_a_row(1, ("a",)), empty_in_a_row(1, None)
    (2, 0, 0)
    """
    return before + 1 if hosts is not None and not hosts else 0
