"""Values as people write them: how often something is done, and which checkpoint is the best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edl_hvd.errors import SettingsError, UsageError

IntervalUnit: TypeAlias = Literal["seconds", "steps", "samples", "epochs", "scale-invariant steps", "auto"]
"""Scale-invariant steps are those of schedulers alone; an interval "auto" is chosen while the job runs."""
_SECONDS = {
    "ms": 1e-3,
    "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600,
}  # fmt: skip
_COUNTS: dict[str, IntervalUnit] = {
    "step": "steps", "steps": "steps", "sample": "samples", "samples": "samples", "epoch": "epochs", "epochs": "epochs",
}  # fmt: skip
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "worker"), count(1200, "worker")
    ('1 worker', '1,200 workers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Interval:
    """``count`` of ``unit``."""

    count: float
    unit: IntervalUnit

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
        number = number if math.isfinite(number) else 0.0  # hundreds of digits
        if unit in _SECONDS and number > 0:
            return cls(number * _SECONDS[unit], "seconds")
        if unit in _COUNTS and number > 0 and (number.is_integer() or _COUNTS[unit] == "epochs"):
            return cls(number, _COUNTS[unit])
        raise SettingsError(
            f"interval {value!r} is not understood; expected seconds as a number, or a string such as "
            "'0.5s', '10min', '500 steps', '100000 samples' or '1 epoch', greater than zero"
        )


@dataclass(frozen=True)
class Best:
    """The least or the greatest value of a metric; ``mode`` is "min" or "max", the words of Keras and Lightning."""

    metric: str
    mode: str

    @classmethod
    def parse(cls, value: str | Best) -> Best:
        """Read a metric's name, a colon and "min" or "max".

        >>> Best.parse("accuracy:max")
        Best(metric='accuracy', mode='max')

        Which values are better is never guessed: the default is "min" in Lightning, and follows from the name in Keras.

        Raises:
            SettingsError: Not of that form.
        """
        if isinstance(value, Best):
            return value
        metric, _, mode = (part.strip() for part in str(value).rpartition(":"))
        if metric and mode in ("min", "max"):
            return cls(metric, mode)
        raise SettingsError(
            f"{value!r} does not say which checkpoint is the best; expected the name of a metric that the script gives "
            "to state.report(), and whether its least or its greatest value is best: 'loss:min' or 'accuracy:max'"
        )

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}"

    def order(self, metrics: Mapping[str, float]) -> float | None:
        """A number that is less for better metrics; ``None`` where the metric is missing, or not a number.

        >>> Best("accuracy", "max").order({"accuracy": 0.75})
        -0.75
        """
        value = metrics.get(self.metric, math.nan)
        if math.isnan(value):
            return None
        return value if self.mode == "min" else -value


def read_seconds(flag: str, text: str) -> float:
    """The value of a flag that is a time: plain seconds, or a form such as "10min".

    >>> read_seconds("--for", "2.5"), read_seconds("--for", "2min")
    (2.5, 120.0)

    Raises:
        UsageError: The text is no time greater than zero.
    """
    is_plain = text.isascii() and text.replace(".", "", 1).isdecimal()
    try:
        interval = Interval.parse(float(text) if is_plain else text)
    except UsageError:
        interval = None
    if interval is None or interval.unit != "seconds":
        raise UsageError(
            f"{flag} {text!r} is not a time; expected seconds as a number, or e.g. '10s' or '2min', greater than zero"
        )
    return interval.count
