"""The descriptors that are open in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Fail if the block leaves a descriptor open.

    Descriptors that an earlier test left to the garbage collector may close meanwhile: a count would miss them.
    """
    gc.collect()
    before = open_descriptors()
    yield
    left = open_descriptors() - before
    assert not left, f"still open: {sorted(left)}"


def open_descriptors() -> set[tuple[int, str]]:
    """The number of each, and what it is open on."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that read the folder
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found
