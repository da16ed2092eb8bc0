"""The flags of one command line, read one by one; what is wrong with any of them is collected, not raised."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.errors import UsageError
from edl_hvd.hosts import read_count
from edl_hvd.values import Interval

PRESENT_NAMES = {"--settle": "--last-call-timeout", "--leave-before": "--drain-lead"}
# Of flags that had another name in the version before.


@dataclass(frozen=True)
class RenamedFlags:
    """Flags under their present names.

    Attributes:
        given: The flags as text, by name.
        notes: A line for each flag that was given under its former name.
        problems: A line for each flag that was given under both names.
    """

    given: Mapping[str, str]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def with_present_names(given: Mapping[str, str]) -> RenamedFlags:
    """The flags of a command line, those with a former name under their present one.

    >>> with_present_names({"--settle": "2", "-np": "4"}).given
    {'-np': '4', '--last-call-timeout': '2'}
    """
    renamed, notes, problems = dict(given), [], []
    for former, name in PRESENT_NAMES.items():
        if former not in given:
            continue
        text = renamed.pop(former)
        if name in given:
            problems.append(f"{former} and {name} are one flag; keep {name} alone")
            continue
        renamed[name] = text
        notes.append(f"{former} is now called {name}; the former name is accepted in this version only")
    return RenamedFlags(renamed, tuple(notes), tuple(problems))


class FlagReader:
    """Reads flags by name. A reader returns ``None`` for a flag that was not given, or not in a way that can be used.

    Args:
        given: The flags as text, by name; a switch is "1" or "0".
        environ: Where the variables that stand in for flags are looked up.

    Attributes:
        problems: A line for each flag that could not be used, naming it, its value and what is accepted.
    """

    def __init__(self, given: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.given = given
        self.environ = environ
        self.problems: list[str] = []

    def add_error(self, problem: str) -> None:
        self.problems.append(" ".join(problem.split()))

    def is_on(self, flag: str) -> bool:
        """Whether a switch is on, or another flag has a value."""
        return self.given.get(flag, "") not in ("", "0")

    def count(self, flag: str, least: int = 0, most: int | None = None) -> int | None:
        text = self.given.get(flag)
        if text is None:
            return None
        known = read_count(text)
        value = least - 1 if known is None else known
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            self.add_error(f"{flag} {text!r} cannot be used; expected a whole number, {bounds}")
            return None
        return value

    def number(self, flag: str, most: float = math.inf) -> float | None:
        text = self.given.get(flag)
        if text is None:
            return None
        value = _read_float(text)
        if not 0 <= value <= most:
            bounds = "at least 0" if math.isinf(most) else f"0 to {most:g}"
            self.add_error(f"{flag} {text!r} cannot be used; expected a number, {bounds}")
            return None
        return value

    def seconds(self, flag: str, default_s: float, least_s: float, variable: str = "") -> float:
        """A time: plain seconds or a form such as "10min"; from ``variable`` if the flag is not given."""
        name, text = flag, self.given.get(flag)
        if text is None and variable:
            name, text = variable, self.environ.get(variable) or None
        if text is None:
            return default_s
        value_s = _read_float(text)
        if math.isnan(value_s):
            try:
                interval = Interval.parse(text)
                value_s = interval.count if interval.unit == "seconds" else math.nan
            except UsageError:
                pass
        if not least_s <= value_s < math.inf:
            self.add_error(
                f"{name} {text!r} cannot be used; expected a time of at least {least_s:g} s, e.g. '30' or '10min'"
            )
            return default_s
        return value_s

    def readable_file(self, flag: str, what: str) -> str | None:
        """The path of an existing file, with ``~`` resolved."""
        text = self.given.get(flag)
        if text is None:
            return None
        path = os.path.expanduser(text)
        if not os.path.exists(path):
            self._add_path_error(flag, "is not there", what)
        elif not os.path.isfile(path):
            self._add_path_error(flag, "is no file", what)
        elif not os.access(path, os.R_OK):
            self._add_path_error(flag, "cannot be read by this user", f"{what} that can")
        return path

    def writable_file(self, flag: str) -> str | None:
        """The absolute path of a file that can be written; its folder exists."""
        path = self._path(flag, "a file")
        if path is None:
            return None
        folder = os.path.dirname(path)
        if os.path.isdir(path):
            self._add_path_error(flag, "is a folder", "a file")
        elif not os.path.isdir(folder):
            self._add_path_error(flag, f"would be in {folder!r}, which is no folder", "a file in one that is there")
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            self._add_path_error(flag, "cannot be written by this user", "a file that can")
        return path

    def writable_folder(self, flag: str) -> str | None:
        """The absolute path of a folder that can be written or, with the folders that lead to it, made."""
        path = self._path(flag, "a folder")
        if path is None:
            return None
        existing = path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            self._add_path_error(flag, f"cannot be a folder, as {existing!r} is none", "a folder")
        elif not os.access(existing, os.W_OK | os.X_OK):
            self._add_path_error(
                flag, f"cannot be written, as {existing!r} cannot be by this user", "a folder that can"
            )
        return path

    def _path(self, flag: str, wanted: str) -> str | None:
        text = self.given.get(flag)
        if text == "":
            self._add_path_error(flag, "is empty", wanted)
        return os.path.abspath(os.path.expanduser(text)) if text else None

    def _add_path_error(self, flag: str, fault: str, wanted: str) -> None:
        self.add_error(f"{flag} {self.given[flag]!r} {fault}; expected the path of {wanted}")


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
