"""A load beside what is measured."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager


def _spin(parent: int) -> None:
    """Compute until the process that started this one is gone."""
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Meanwhile that many processes compute without a pause, on every processor they get."""
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()
