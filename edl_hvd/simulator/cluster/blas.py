"""Loads scipy so that its linear algebra runs in one thread.

A job's model has seven parameters. With threads, OpenBLAS spends fifteen times the processor time on a fit of it, in
which its threads wait for each other. OpenBLAS reads its number of threads once, where it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "OPENBLAS_NUM_THREADS"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Import what loads OpenBLAS in this block; a number that the user has set holds.

    The environment is as before afterwards, so that programs that are started later do not inherit the number.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
