"""The CSV form of a trace, which is that of the Bamboo project's traces of AWS.

    # comments and empty lines do not count
    0,add,node1,node2            milliseconds since the beginning, kind of change, hosts
    480000,remove,node1
    480000,price,0.918           price of one host for an hour in US dollars from now on (original here)
    900000,end                   end of the record, if it is later than the row above (original here)

Rows are in order of time. A row adds absent hosts or removes present ones.
"""

from __future__ import annotations

import csv
import io
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots, shown
from edl_hvd.traces.trace import HostChange, Trace

_SHIPPED = Path(__file__).parent / "shipped"
_MOST_DIGITS = 15
# Thirty thousand years in milliseconds.
_FORM = (
    "expected 'MILLISECONDS,add,HOST', 'MILLISECONDS,remove,HOST', 'MILLISECONDS,price,USD_PER_HOUR' or, as the "
    "last row, 'MILLISECONDS,end'"
)


def read_trace(path: str) -> Trace:
    """Read the trace in a file.

    Args:
        path: Path of the file, or the name of a trace that comes with this package, "spot-day".

    Raises:
        UsageError: The file cannot be read, or a line is wrong; the message has its number.
    """
    shipped = _SHIPPED / f"{os.path.basename(path)}.csv"
    try:
        with open(path if os.path.exists(path) or not shipped.is_file() else shipped, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the trace {path} is not text: {error}") from error
    return parse_trace(text, path)


def parse_trace(text: str, name: str) -> Trace:
    """Read the CSV form; ``name`` is for messages.

    Raises:
        UsageError: A line is wrong; the message has its number, its text and what is accepted.
    """
    reader = _RowReader()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            reader.read(next(csv.reader([line.strip()])))
        except (UsageError, csv.Error) as error:
            raise UsageError(f"{name} line {number}: {error}") from error
    if not any(moment.added for moment in reader.moments):
        raise UsageError(f"{name} has no host; expected at least a line such as '0,add,node1'")
    return Trace(tuple(moment.change() for moment in reader.moments))


def format_trace(trace: Trace, comment: str = "") -> str:
    """Write the CSV form: ``comment``, if any, and a row for each host.

    >>> changes = HostChange(0, ("a", "b"), price_usd_per_h=0.9), HostChange(1.5, ("c",), ("a",))
    >>> print(format_trace(Trace(changes)), end="")
    0,price,0.9
    0,add,a
    0,add,b
    1500,remove,a
    1500,add,c
    """
    text = io.StringIO()
    text.write("".join(f"# {line}\n" for line in comment.splitlines()))
    rows = csv.writer(text, lineterminator="\n")
    for change in trace.changes:
        time_ms = round(change.time_s * 1000)
        if change.price_usd_per_h is not None:
            rows.writerow((time_ms, "price", f"{change.price_usd_per_h:.10g}"))
        rows.writerows((time_ms, "remove", host) for host in change.removed)
        rows.writerows((time_ms, "add", host) for host in change.added)
        if change == HostChange(change.time_s):
            rows.writerow((time_ms, "end"))
    return text.getvalue()


@dataclass
class _Moment:
    time_ms: int
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    price_usd_per_h: float | None = None

    def change(self) -> HostChange:
        return HostChange(self.time_ms / 1000, tuple(self.added), tuple(self.removed), self.price_usd_per_h)


class _RowReader:
    """State of the reader after the rows so far."""

    def __init__(self) -> None:
        self.moments: list[_Moment] = []
        self._present: set[str] = set()
        self._ended = False

    def read(self, row: list[str]) -> None:
        words = [word.strip() for word in row]
        what = words[1] if len(words) > 1 and all(words) else ""
        if not (what in ("add", "remove", "price") and len(words) > 2) and not (what == "end" and len(words) == 2):
            raise UsageError(f"{shown(','.join(row))} is not understood; {_FORM}")
        if self._ended:
            raise UsageError(f"{shown(','.join(row))} comes after the end; expected 'end' in the last row")
        moment = self._moment(words[0])
        self._ended = what == "end"
        if what == "price":
            moment.price_usd_per_h = _read_price(words[2:])
        elif what != "end":
            for host in words[2:]:
                (self._add if what == "add" else self._remove)(HostSlots(host, 1).host, moment)

    def _moment(self, text: str) -> _Moment:
        if not (text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS):
            raise UsageError(f"time {shown(text)} is not understood; expected whole milliseconds since the beginning")
        time_ms, last_ms = int(text), self.moments[-1].time_ms if self.moments else -1
        if time_ms < last_ms:
            raise UsageError(f"time {text} is before that of the row above ({last_ms}); expected order of time")
        if time_ms > last_ms:
            self.moments.append(_Moment(time_ms))
        return self.moments[-1]

    def _add(self, host: str, moment: _Moment) -> None:
        if host in self._present:
            raise UsageError(f"{host} is added but is there already; expected a row that removes it before")
        self._present.add(host)
        moment.added.append(host)

    def _remove(self, host: str, moment: _Moment) -> None:
        if host not in self._present:
            raise UsageError(f"{host} is removed but is not there; expected a row that adds it before")
        if host in moment.added:
            raise UsageError(f"{host} is removed at the moment at which it is added; expected a later one")
        self._present.remove(host)
        moment.removed.append(host)


def _read_price(words: list[str]) -> float:
    try:
        price = float(words[0])
    except ValueError:
        price = math.nan
    if len(words) > 1 or not 0 <= price < math.inf:
        raise UsageError(
            f"price {shown(','.join(words))} is not understood; expected one number of US dollars, e.g. '0.918'"
        )
    return price
