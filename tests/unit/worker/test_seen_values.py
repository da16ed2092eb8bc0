"""What a variable was when a loop began is told from what it is now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from edl_hvd.worker.script_locals import SeenValue


class Thing:
    pass


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(2), lambda: numpy.zeros(5000), Thing], ids=["tensor", "array", "object"]
)
def test_another_object_at_the_same_address_is_another_value(make: Callable[[], Any]) -> None:
    """Such as a running mean that is computed anew in each step: CPython gives it the address of the former one."""
    value = make()
    seen, address = SeenValue.of(value), id(value)
    assert not seen.has_changed(value)
    del value
    for _ in range(100):
        other = make()
        if id(other) == address:
            break
    else:
        pytest.skip("no new object was given the address of the former one")
    assert seen.has_changed(other)
