"""How noisy the gradient is, from two sizes of batch, and what a larger batch is worth.

A step's **small** gradients g_i are those of one micro-batch of n_i samples on each of R ranks, its **large** one is
the mean over all G samples of the step. With ∇F the true gradient and Σ the covariance of one sample's gradient,

    E |g_i|² = |∇F|² + tr(Σ) / n_i        E |g|² = |∇F|² + tr(Σ) / G

(McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), so the mean of the R small squares belongs to a batch of
n, the harmonic mean of the n_i, and both unknowns follow without bias:

    tr(Σ) = (mean |g_i|² - |g|²) / (1/n - 1/G)        |∇F|² = (G |g|² - n mean |g_i|²) / (G - n)

Each by itself is noisy and may be negative; what is used is the quotient of their means over many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# AdaScale averages over 1000 / S steps (Johnson et al. 2020, arXiv:2007.05105, section 4): a large step tells more.
_WINDOW_STEPS = 1000


@dataclass(frozen=True)
class Observation:
    """What one step has shown.

    Attributes:
        small_square: Mean of the squared norms of the small gradients.
        small_samples: Harmonic mean of their numbers of samples, n.
        large_square: Squared norm of the summed gradient.
        large_samples: Its number of samples, G.
    """

    small_square: float
    small_samples: float
    large_square: float
    large_samples: float

    @property
    def is_usable(self) -> bool:
        """The two batches differ, and no gradient was infinite or not a number."""
        return (
            math.isfinite(self.small_square)
            and math.isfinite(self.large_square)
            and self.large_samples - self.small_samples > 1e-6
        )

    @property
    def variance(self) -> float:
        """An estimate of tr(Σ), without bias.

        >>> Observation(small_square=3.0, small_samples=4, large_square=2.0, large_samples=8).variance
        8.0
        """
        return (self.small_square - self.large_square) / (1 / self.small_samples - 1 / self.large_samples)

    @property
    def square(self) -> float:
        """An estimate of |∇F|², without bias.

        >>> Observation(small_square=3.0, small_samples=4, large_square=2.0, large_samples=8).square
        1.0
        """
        difference = self.large_samples - self.small_samples
        return (self.large_samples * self.large_square - self.small_samples * self.small_square) / difference


@dataclass(frozen=True)
class Noise:
    """Exponential means of the two estimates; an immutable value.

    Attributes:
        variance: Of tr(Σ), times ``weight``.
        square: Of |∇F|², times ``weight``.
        weight: What an exponential mean that began with 0 lacks to 1; 0 before the first step.
    """

    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def after(self, observation: Observation, scale: float = 1.0) -> Noise:
        """The means after one more step; unchanged by a step that shows nothing.

        Args:
            observation: Of that step.
            scale: S of that step, how many base batches it has; the mean is over some 1000 / S steps.
        """
        if not observation.is_usable:
            return self
        new = min(1.0, max(1.0, scale) / _WINDOW_STEPS)
        return Noise(
            (1 - new) * self.variance + new * observation.variance,
            (1 - new) * self.square + new * observation.square,
            (1 - new) * self.weight + new,
        )

    @property
    def samples(self) -> float | None:
        """The gradient noise scale tr(Σ) / |∇F|² ("simple" in McCandlish et al., section 2.2), in samples.

        At a batch of that size the noise of the gradient is as large as the gradient. ``None`` before it was measured,
        infinite where no gradient stands out from the noise.

        >>> Noise(variance=4.0, square=0.5, weight=0.5).samples
        8.0
        """
        if self.weight == 0:
            return None
        variance, square = max(self.variance, 0.0), max(self.square, 0.0)
        if variance == 0:
            return 0.0
        return variance / square if square > 0 else math.inf

    def gain(self, scale: float, base_samples: int) -> float:
        """AdaScale's r (Johnson et al. 2020, section 3): what a step of S base batches is worth in steps of one.

            r = (σ² + μ²) / (σ² / S + μ²),   σ² = tr(Σ) / base_samples,   μ² = |∇F|²

        1 where all gradients are equal, S where they are nothing but noise, always between the two. S below 1 (a world
        smaller than the script's own) gives r from S to 1. Before anything was measured the smaller of 1 and S.

        >>> Noise(variance=32.0, square=1.0, weight=1.0).gain(scale=4.0, base_samples=32)
        1.6
        """
        least, most = min(1.0, scale), max(1.0, scale)
        variance, square = max(self.variance, 0.0) / base_samples, max(self.square, 0.0)
        below = variance / scale + square
        if self.weight == 0 or below == 0:
            return least if self.weight == 0 else 1.0
        return min(max((variance + square) / below, least), most)

    def as_dict(self) -> dict[str, float]:
        return {"variance": self.variance, "square": self.square, "weight": self.weight}
