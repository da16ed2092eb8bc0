"""Generators of NumPy and ``random`` in ``State``: their states go through JSON."""

from __future__ import annotations

import json
import random

import numpy
import pytest

from edl_hvd.errors import StateError
from edl_hvd.worker.codec import decode, encode
from edl_hvd.worker.commits.dirty import FrozenParameters
from edl_hvd.worker.commits.handlers import Handler, handler_for


def handled(value: object) -> Handler:
    handler = handler_for("rng", value, frozenset(), FrozenParameters())
    assert handler is not None
    return handler


BITS = [numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64, numpy.random.PCG64DXSM]
MAKES = [
    *(lambda seed, bits=bits: numpy.random.Generator(bits(seed)) for bits in BITS),
    numpy.random.RandomState,
    random.Random,
]


def drawn(generator) -> list[float]:
    normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
    return [float(normal(0, 1)) for _ in range(3)]


@pytest.mark.parametrize("make", MAKES)
def test_it_goes_on_from_where_it_was(make) -> None:
    one, other = make(1), make(2)
    drawn(one)
    plain, tensors = encode(handled(one).capture(), "rng")
    assert not tensors
    expected = drawn(one)
    handled(other).load(decode(json.loads(json.dumps(plain)), {}))
    assert drawn(other) == expected


def test_the_state_of_another_kind_of_generator_is_refused() -> None:
    saved = handled(numpy.random.Generator(numpy.random.PCG64(1))).capture()
    with pytest.raises(ValueError, match="it is that of a PCG64, not of a MT19937"):
        handled(numpy.random.Generator(numpy.random.MT19937(1))).load(saved)


def test_a_generator_of_the_system_is_refused() -> None:
    with pytest.raises(StateError, match="SystemRandom"):
        handler_for("rng", random.SystemRandom(), frozenset(), FrozenParameters())
