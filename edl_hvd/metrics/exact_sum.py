"""Sums of floating-point numbers without rounding, so that neither order nor grouping shows.

A float64 is an integer times a power of two, and so is every sum of them. The integer is kept in words of 32 bits,
least significant first, in int64 each: adding never carries, and words of two sums are added one by one. Rounding
happens once, when the sum is read. The idea is Kulisch's long accumulator (Kulisch, "Computer Arithmetic and Validity",
2008, chapter 8), the carry-save form that of Neal, arXiv:1505.05571.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_WORD_BITS = 32
_MASK = (1 << _WORD_BITS) - 1
_MANTISSA_BITS = 53
_LOWEST = -1073 - _MANTISSA_BITS  # exponent of the least significant bit that the smallest float64 has room for
# From there up to 2^1024, 31 bits more for two thousand million summands, and one for the sign.
_DIGITS = -(-(1024 - _LOWEST + 32) // _WORD_BITS)
WORDS = _DIGITS + 3
"""Length of a sum: the integer's words, then how many summands were NaN, +infinity and -infinity."""
MOST_SUMMANDS = 1 << 16
"""Number of summands above which a sum is carried: what 8,192 ranks have of no more than these can be added up."""


@torch.no_grad()
def exact_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of all values, unrounded. Does not wait for a GPU.

    Args:
        values: Any shape and device; converted to float64. At most 2^28 of them.

    Returns:
        int64, shape [WORDS], on the same device. Such sums of together at most 2^29 values may be added up, in any
        order, and more of them where they are ``carried``; see ``value_of``.
    """
    values = values.detach().double().reshape(-1)
    finite = values.isfinite()
    fraction, exponent = torch.frexp(values)
    whole = torch.where(finite, fraction * 2.0**_MANTISSA_BITS, 0.0).long()
    place = torch.where(finite, exponent.long() - (_MANTISSA_BITS + _LOWEST), 0)
    digit, shift = place >> 5, place & (_WORD_BITS - 1)
    low, high = (whole & _MASK) << shift, (whole >> _WORD_BITS) << shift  # below 2^63 and 2^53; high has the sign
    words = torch.zeros(WORDS, dtype=torch.int64, device=values.device)
    words.index_add_(0, digit, low & _MASK)
    words.index_add_(0, digit + 1, (low >> _WORD_BITS) + (high & _MASK))
    words.index_add_(0, digit + 2, high >> _WORD_BITS)
    other = _DIGITS + (values == torch.inf).long() + 2 * (values == -torch.inf)  # where it is not finite
    words.index_add_(0, other, (~finite).long())
    return words


def carried(words: torch.Tensor) -> torch.Tensor:
    """The same sums, with room for 2^28 summands more. Does not wait for a GPU.

    Args:
        words: int64, shape [..., WORDS], on any device.
    """
    words = words.clone()
    digits = words[..., :_DIGITS]
    over = digits[..., :-1] >> _WORD_BITS
    digits[..., :-1] &= _MASK
    digits[..., 1:] += over
    return words


def value_of(words: torch.Tensor) -> float:
    """The float64 nearest to a sum; infinite or NaN as a sum in float64 would be.

    >>> value_of(exact_sum(torch.tensor([1e300, 1.0, -1e300, 2.0], dtype=torch.float64)))
    3.0

    Args:
        words: int64, shape [WORDS].
    """
    return ratio_of(words, exact_sum(torch.ones(1)))


def ratio_of(dividend: torch.Tensor, divisor: torch.Tensor) -> float:
    """The float64 nearest to the quotient of two sums; NaN for 0 / 0.

    >>> ratio_of(exact_sum(torch.tensor([1.0, 1.0])), exact_sum(torch.tensor([3.0])))
    0.6666666666666666
    """
    over, under = dividend.tolist(), divisor.tolist()
    if any(over[_DIGITS:]) or any(under[_DIGITS:]):
        above, below = _special(over), _special(under)
        return above / below if below else math.nan
    numerator, denominator = _integer(over), _integer(under)
    if denominator == 0:
        return _sign(numerator) * math.inf  # 0 · infinity is NaN
    try:
        return numerator / denominator  # Python rounds the quotient of two integers once
    except OverflowError:
        return _sign(numerator) * _sign(denominator) * math.inf


def _integer(words: Sequence[int]) -> int:
    return sum(word << (i * _WORD_BITS) for i, word in enumerate(words[:_DIGITS]))


def _special(words: Sequence[int]) -> float:
    """A sum with summands that are not finite, or may have none."""
    nan, positive, negative = words[_DIGITS:]
    if nan or (positive and negative):
        return math.nan
    if positive or negative:
        return math.inf if positive else -math.inf
    return _sign(_integer(words))


def _sign(whole: int) -> float:
    return float((whole > 0) - (whole < 0))
