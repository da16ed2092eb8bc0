"""The mark that runs a test on stock Horovod too."""

from __future__ import annotations

import pytest


def fails_on_stock(reason: str, always: bool = False) -> pytest.MarkDecorator:
    """Run the test with ``engine`` "edl_hvd", and with "stock", where it must fail.

    Args:
        reason: What goes wrong on stock Horovod 0.28.1.
        always: Run the stock variant without ``--stock`` as well.
    """
    marks = [pytest.mark.xfail(strict=True, reason=f"stock Horovod: {reason}")]
    if not always:
        marks.append(pytest.mark.stock)
    return pytest.mark.parametrize("engine", ["edl_hvd", pytest.param("stock", marks=marks)])
