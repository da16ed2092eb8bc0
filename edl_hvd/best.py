"""Which checkpoint is the best: by which number a script reports, as people write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.errors import SettingsError


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
