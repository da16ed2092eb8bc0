"""A factor that moves to its target over a number of samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """Linear from ``start`` at ``begin`` to ``target`` at ``begin + length`` and after.

    factor(s) = start + (target - start) · (s - begin) / length   for begin <= s < begin + length
    factor(s) = target                                             for s >= begin + length

    where s is the number of samples consumed by the whole run. At s = begin the factor is ``start``
    when length > 0 and ``target`` when length = 0.

    >>> Ramp(start=1.0, target=3.0, begin=100, length=200).factor(200)
    2.0
    """

    start: float = 1.0
    target: float = 1.0
    begin: int = 0
    length: int = 0

    def factor(self, samples: int) -> float:
        if samples >= self.begin + self.length:
            return self.target
        return self.start + (self.target - self.start) * (samples - self.begin) / self.length

    def toward(self, target: float, samples: int, length: int) -> Ramp:
        """The ramp from where this one stands at ``samples`` to ``target``; itself if that is its target."""
        if target == self.target:
            return self
        return Ramp(self.factor(samples), target, samples, length)

    def as_dict(self) -> dict[str, float]:
        return {"start": self.start, "target": self.target, "begin": self.begin, "length": self.length}
