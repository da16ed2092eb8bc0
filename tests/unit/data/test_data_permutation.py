"""A shuffled order that nobody holds: each number once, at random, from any place on, alike everywhere."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.data.permutation import LARGEST, Permutation


def whole(length: int, *key: int) -> numpy.ndarray:
    return Permutation(length, *key)(numpy.arange(length))


def deviations(chi_square: float, degrees: float) -> float:
    """How far a chi-square is from its mean, in standard deviations."""
    return abs(chi_square - degrees) / math.sqrt(2 * degrees)


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_each_number_comes_once(length, seed, epoch):
    assert sorted(whole(length, seed, epoch).tolist()) == list(range(length))


@pytest.mark.parametrize("length", [*range(1, 70), 2**16 - 1, 2**16, 2**16 + 1, 510 * 511, 511**2, 512**2, 10**6])
def test_each_number_comes_once_at_lengths_where_the_digits_change(length):
    assert numpy.array_equal(numpy.sort(whole(length, 1)), numpy.arange(length))


@given(length=st.integers(1, LARGEST), data=st.data())
def test_a_stretch_of_a_long_order_has_no_number_twice_and_none_outside(length, data):
    first = data.draw(st.integers(0, length - 1))
    numbers = Permutation(length, 7)(numpy.arange(first, min(first + 200, length)))
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < length


@given(length=st.integers(1, 500), first=st.integers(0, 499), count=st.integers(1, 20))
def test_what_stands_at_a_position_does_not_depend_on_what_else_is_looked_at(length, first, count):
    stretch = numpy.arange(first, first + count) % length
    assert numpy.array_equal(Permutation(length, 3)(stretch), whole(length, 3)[stretch])


def test_the_order_is_this_one_on_every_machine_and_in_every_release():
    """Positions in saved checkpoints rely on it: whoever changes it has to rename the order."""
    digest = hashlib.sha256(b"".join(whole(n, 5, n).astype("<i8").tobytes() for n in (1, 2, 10, 1000, 70_000)))
    far = Permutation(1_300_000_000, 0, 3)(numpy.array([0, 650_000_000, 1_299_999_999]))
    assert (digest.hexdigest()[:16], far.tolist()) == ("b0b06ca2f9643027", [975492707, 117465467, 351300956])


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_as_frequent(length):
    """60 per order on average; 5 standard deviations are left, with fixed keys."""
    orders, times = math.factorial(length), 60
    found = Counter(tuple(whole(length, key).tolist()) for key in range(orders * times))
    chi_square = sum((count - times) ** 2 / times for count in found.values()) + (orders - len(found)) * times
    assert deviations(chi_square, orders - 1) < 5


@pytest.mark.parametrize("length", [1_000, 2**16, 300_007])
def test_where_a_number_comes_from_says_nothing_of_what_it_is(length):
    """Blocks of positions against blocks of numbers, for ten keys."""
    blocks, keys = 40, 10
    block = numpy.arange(length) * blocks // length
    chi_square = 0.0
    for key in range(keys):
        table = numpy.zeros((blocks, blocks))
        numpy.add.at(table, (block, whole(length, key) * blocks // length), 1)
        expected = numpy.outer(numpy.bincount(block), numpy.bincount(block)) / length
        chi_square += ((table - expected) ** 2 / expected).sum()
    assert deviations(chi_square, keys * (blocks - 1) ** 2) < 5


@pytest.mark.parametrize("length", [1_000, 2**16, 300_007])
def test_neighbours_are_not_related(length):
    """Steps from one number to the next, one modulo the length, are as frequent in each of 50 classes; so are pairs."""
    classes = 50
    numbers = whole(length, 11)
    steps = numpy.bincount((numpy.diff(numbers) % length) * classes // length, minlength=classes)
    expected = (length - 1) / classes
    assert deviations(((steps - expected) ** 2 / expected).sum(), classes - 1) < 5
    correlation = numpy.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(length)


def test_orders_of_neighbouring_keys_have_nothing_in_common():
    length = 100_000
    orders = [whole(length, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 10  # one is expected, by chance
            assert abs(numpy.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(length)


@pytest.mark.parametrize("length", [0, -3, LARGEST + 1])
def test_a_length_out_of_range_is_refused(length):
    with pytest.raises(ValueError, match="expected 1 to"):
        Permutation(length, 0)
