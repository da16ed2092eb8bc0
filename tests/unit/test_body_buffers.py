"""Memory of bodies is in use while anything views it."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.frames import Array, ArrayType


@pytest.mark.parametrize(
    "view",
    [
        lambda buffer: buffer,
        lambda buffer: memoryview(buffer)[3:5],
        lambda buffer: memoryview(buffer).cast("q"),
        lambda buffer: torch.frombuffer(buffer, dtype=torch.float32)[1:],
        lambda buffer: numpy.frombuffer(buffer, numpy.int16)[::2][1:],
        lambda buffer: Array(ArrayType("x", "uint8", (len(buffer),)), buffer),
    ],
    ids=["itself", "slice", "cast", "tensor", "array", "body"],
)
@pytest.mark.parametrize("size_bytes", [64, 1 << 20])
def test_memory_is_in_use_while_anything_views_it_however_python_counts_references(monkeypatch, view, size_bytes):
    """From Python 3.14 on a local name need not count, so that a buffer with one user looks like one with none."""
    monkeypatch.setattr(sys, "getrefcount", lambda _: 3)
    buffers = BodyBuffers(1)
    buffer = buffers.take(size_bytes)
    buffer[0] = 7
    user = view(buffer)
    del buffer
    assert buffers.take(size_bytes)[0] == 0, "it is other memory"
    del user
