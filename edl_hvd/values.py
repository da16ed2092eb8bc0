"""How often: a span of seconds, steps, samples or epochs, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edl_hvd.errors import SettingsError

_SECONDS = {
    "ms": 1e-3,
    "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600,
}  # fmt: skip
_COUNTS = {"step": "steps", "steps": "steps", "sample": "samples", "samples": "samples",
           "epoch": "epochs", "epochs": "epochs"}  # fmt: skip
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


@dataclass(frozen=True)
class Interval:
    """``count`` of ``unit``; ``unit`` is "seconds", "steps", "samples" or "epochs", or "auto", chosen while it runs."""

    count: float
    unit: str

    @property
    def is_auto(self) -> bool:
        return self.unit == "auto"

    @classmethod
    def parse_or_auto(cls, value: str | float | Interval) -> Interval:
        """Like :meth:`parse`, and "auto" as well."""
        if isinstance(value, str) and value.strip().lower() == "auto":
            return cls(0, "auto")
        try:
            return cls.parse(value)
        except SettingsError as error:
            raise SettingsError(f"{error}, or 'auto'") from None

    @classmethod
    def parse_counted(cls, value: str | float | Interval) -> Interval:
        """Like :meth:`parse`, but only what a checkpoint has a number of: steps, samples and finished epochs."""
        try:
            interval = cls.parse(value)
        except SettingsError:
            interval = None
        if interval is None or interval.unit not in _COUNTS.values() or not interval.count.is_integer():
            raise SettingsError(
                f"checkpoints are not numbered by {value!r}; expected an interval in steps, samples or whole epochs, "
                "such as '10000 steps', '1000000 samples' or '5 epochs'"
            )
        return interval

    @classmethod
    def parse(cls, value: str | float | Interval) -> Interval:
        """Read a number of seconds or a string such as "0.5s", "10min", "500 steps", "1 epoch".

        >>> Interval.parse("10min")
        Interval(count=600.0, unit='seconds')
        >>> Interval.parse("500 steps")
        Interval(count=500.0, unit='steps')

        Raises:
            SettingsError: Not of that form, or not greater than zero, or a fraction of a step or sample.
        """
        if isinstance(value, Interval):
            return value
        match = _FORM.fullmatch(str(value).strip().lower())
        number, unit = (float(match[1]), match[2] or "s") if match else (0.0, "")
        if unit in _SECONDS and number > 0:
            return cls(number * _SECONDS[unit], "seconds")
        if unit in _COUNTS and number > 0 and (number.is_integer() or _COUNTS[unit] == "epochs"):
            return cls(number, _COUNTS[unit])
        raise SettingsError(
            f"interval {value!r} is not understood; expected seconds as a number, or a string such as "
            "'0.5s', '10min', '500 steps', '100000 samples' or '1 epoch', greater than zero"
        )
