"""A shuffled order that is computed where it is looked at, instead of being held: any place of it costs the same."""

from __future__ import annotations

import math

import numpy
from numpy.typing import NDArray

from edl_hvd.data.randomness import seed_of

Integers = NDArray[numpy.int64]
Words = NDArray[numpy.uint64]

# Four rounds make a Feistel network a strong pseudorandom permutation for few looks (Luby and Rackoff 1988). Here all
# of it is looked at, so there are twice as many; and below some ten numbers 12 rounds still prefer some orders
# measurably.
ROUNDS = 8
ROUNDS_OF_SMALL = 16
SMALL = 2**16
LARGEST = 2**60  # halves stay below 2**31, so that a 32-bit random word times a half fits into 64 bits

# Odd constants with no pattern in their bits: 2**64 divided by the golden ratio, and one of the finalisers that
# Stafford published in 2011 ("Better Bit Mixing", variant 13).
_SPREAD = numpy.uint64(0x9E3779B97F4A7C15)
_MIX = numpy.uint64(0xBF58476D1CE4E5B9)
_HALF = numpy.uint64(32)


class Permutation:
    """A bijection of 0 … length - 1 that a key selects; pure integer arithmetic, so equal on every machine.

    The generalised Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section
    5): a number below a·b, with a·b >= length, is two digits ``high`` · a + ``low``, and each round adds to one digit a
    random function of the other. What leaves the range goes through once more ("cycle walking", section 3 there), which
    keeps it a bijection. With a and b next to the root of the length hardly anything does.

    Memory: 64 bytes of keys. Time: some 10 µs per round and call, whatever the length, plus 20 ns per number and round.

    Args:
        length: Of the range, in [1, 2**60].
        *key: Integers, e.g. (seed, epoch); another key gives an unrelated order.
    """

    def __init__(self, length: int, *key: int) -> None:
        if not 1 <= length <= LARGEST:
            raise ValueError(f"a permutation of {length} numbers was asked for; expected 1 to 2**60")
        self.length = length
        # Even: with two odd digits every round is an even permutation, and half of all orders would never come.
        self._low = 2 * (math.isqrt(length - 1) // 2 + 1)
        self._high = max(2, -(-length // self._low))
        rounds = ROUNDS_OF_SMALL if length < SMALL else ROUNDS
        keys = [seed_of(*key, number) for number in range(rounds)]
        self._keys = [numpy.array(value, dtype=numpy.uint64) for value in keys]

    def __call__(self, positions: Integers) -> Integers:
        """What stands at each position.

        Args:
            positions: int64 of any shape, each in [0, length).

        Returns:
            int64 of the same shape, each in [0, length); different for different positions.

        >>> Permutation(10, 0)(numpy.arange(10)).tolist()
        [5, 4, 8, 9, 3, 6, 1, 0, 7, 2]
        >>> Permutation(10, 0)(numpy.array([3, 4])).tolist()
        [9, 3]
        >>> Permutation(10**18, 0)(numpy.array([5 * 10**17])).tolist()
        [134401515643044667]
        """
        numbers = self._once(positions.astype(numpy.uint64))
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._once(numbers[outside])
        return numbers.astype(numpy.int64)

    def _once(self, numbers: Words) -> Words:
        """The cipher on all of [0, a·b)."""
        size, other = numpy.uint64(self._low), numpy.uint64(self._high)
        right, left = numpy.divmod(numbers, size)
        for key in self._keys:
            moved = left + random_below(size, right, key)
            left, right = right, numpy.where(moved >= size, moved - size, moved)
            size, other = other, size
        # After an even number of rounds the digits are where they began.
        whole: Words = right * size + left
        return whole


def random_below(size: numpy.uint64, numbers: Words, key: Words) -> Words:
    """A number in [0, size) for each number, as if drawn at random; ``size`` at most 2**31.

    A 32-bit word is scaled instead of divided (Lemire 2019, "Fast Random Integer Generation in an Interval"); no value
    is more than size / 2**32 too frequent.
    """
    below: Words = (random_words(numbers, key) >> _HALF) * size >> _HALF
    return below


def random_words(numbers: Words, key: Words) -> Words:
    """64 bits for each number, as if drawn at random, chosen by a key."""
    mixed: Words = (numbers ^ key) * _SPREAD
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed ^= mixed >> _HALF
    mixed *= _SPREAD
    return mixed
