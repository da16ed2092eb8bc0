"""When it is believed that hosts are gone: one rule for polls, for the parts of a union and for ``edlrun``. Pure.

One answer that lacks hosts is as likely a cloud's hiccup as the truth; the second in a row, a refresh later, is not. A
failure is no answer, so that the count begins anew after it.
"""

from __future__ import annotations

from collections.abc import Sequence

IN_A_ROW = 2


def is_believed(answers: int) -> bool:
    """Whether what this number of answers in a row has lacked is gone."""
    return answers >= IN_A_ROW


def empty_in_a_row(before: int, hosts: Sequence[object] | None) -> int:
    """The number of answers in a row without any host, after one more answer; ``None``: a failure.

    >>> empty_in_a_row(1, ()), empty_in_a_row(1, ("a",)), empty_in_a_row(1, None)
    (2, 0, 0)
    """
    return before + 1 if hosts is not None and not hosts else 0
