"""Read the flags of a discovery script.

``argparse`` is not used: this runs at every poll of a local source, and a flag has to replace the value of its
variable, not to add to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.errors import UsageError
from edl_hvd.hosts import read_count, shown
from edl_hvd.values import Interval


class Flags:
    """Flags of one command line, by name.

    Args:
        given: Words of the command line: ``--name value``, ``--name=value``, or at most one bare value, which stands
            for ``--<bare>``.
        variables: Words from environment variables, always ``--name=value``; empty values, and flags that are also in
            ``given``, do not count.
        known: Names that are accepted.
        bare: Name of the flag that a bare value stands for; empty for none.
    """

    def __init__(self, given: Sequence[str], variables: Sequence[str], known: Sequence[str], bare: str = "") -> None:
        self._known = known
        self._values: dict[str, list[str]] = {}
        for word in variables:
            name, _, value = word.removeprefix("--").partition("=")
            if value:
                self._values[name] = [value]
        typed: dict[str, list[str]] = {}
        words = list(given)
        while words:
            name, value = self._take(words, bare)
            typed.setdefault(name, []).append(value)
        self._values.update(typed)

    def _take(self, words: list[str], bare: str) -> tuple[str, str]:
        word = words.pop(0)
        if not word.startswith("--"):
            if not bare:
                raise UsageError(f"unexpected word {word!r}; {self._accepted()}")
            return bare, word
        name, equals, value = word[2:].partition("=")
        if name not in self._known:
            raise UsageError(f"unknown flag {word!r}; {self._accepted()}")
        if not equals:
            if not words:
                raise UsageError(f"--{name} has no value; expected one after it")
            value = words.pop(0)
        return name, value

    def _accepted(self) -> str:
        return "accepted: " + ", ".join(f"--{name}" for name in self._known)

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def text(self, name: str, default: str) -> str:
        values = self.all(name)
        if len(values) > 1:
            raise UsageError(f"--{name} is given {len(values)} times ({', '.join(values)}); expected once")
        return values[0] if values else default

    def needed(self, name: str, what: str, example: str) -> list[str]:
        values = [value for value in self.all(name) if value]
        if not values:
            raise UsageError(f"no {what} is given; expected e.g. '{example}'")
        return values

    def yes_no(self, name: str) -> bool:
        """Whether the flag is "yes". It has a value, because each flag has a variable, too."""
        text = self.text(name, "no")
        if text not in ("yes", "no"):
            raise UsageError(f"--{name} {text!r} is not understood; expected yes or no")
        return text == "yes"

    def count(self, name: str, default: int) -> int:
        text = self.text(name, str(default))
        number = read_count(text)
        if not number:
            raise UsageError(f"--{name} {shown(text)} is not usable; expected a whole number, at least 1")
        return number

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name, "")
        if text in ("", "0"):
            return 0.0 if text else default
        interval = Interval.parse(text)
        if interval.unit != "seconds":
            raise UsageError(f"--{name} {text!r} is not a time; expected e.g. '30' or '5min'")
        return interval.count
