"""The history of a job's membership in a file, and its replay.

``transition.transition`` is a pure function of what happens, so a file of what happened is all that is needed to make
every decision again: on another machine, under a debugger, or with a newer version of that function. JSON lines:

    {"format": "edl_hvd membership 1", "rules": {"num_proc": 2, …}}
    {"at_s": 0.0, "what": "HostsFound", "hosts": [{"host": "a", "slots": 2}], "actions": [{"what": "Spawn", …}, …]}
    {"at_s": 1.25, "what": "Ready", "worker": "a:0", "incarnation": 1, "step": -1, "actions": []}

``at_s`` counts from the start of the job and is the very number that was decided with. ``actions`` is what followed;
a history written by hand may leave it out. Time passes twenty times a second, mostly without consequence: a ``Tick``
stands in the file only where a replay without it would come to other decisions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from edl_hvd.driver.membership.events import Action, MembershipEvent, Tick, action_from_json, event_from_json, to_json
from edl_hvd.driver.membership.state import Membership, Rules, begin
from edl_hvd.driver.membership.transition import transition
from edl_hvd.errors import UsageError
from edl_hvd.json_values import read_fields, read_number, show

logger = logging.getLogger(__name__)

FORMAT = "edl_hvd membership 1"
_CUT_SHORT = "its last line is cut short, as when the driver is killed while it writes; that line was left out"


@dataclass(frozen=True)
class HistoryEntry:
    """One line of a history. ``actions`` followed, as far as it says so."""

    at_s: float
    event: MembershipEvent
    actions: tuple[Action, ...] | None = None


@dataclass(frozen=True)
class History:
    """A history that was read. ``note`` is what was wrong with its file and yet tolerated, for people."""

    rules: Rules
    entries: tuple[HistoryEntry, ...]
    note: str = ""


@dataclass(frozen=True)
class Decision:
    """One entry run again.

    Attributes:
        at_s: Seconds since the start of the job.
        event: What happened.
        actions: What follows now.
        membership: After it.
        recorded: What followed then, or ``None`` where the history does not say.
    """

    at_s: float
    event: MembershipEvent
    actions: tuple[Action, ...]
    membership: Membership
    recorded: tuple[Action, ...] | None

    @property
    def differs(self) -> bool:
        """Another version of the state machine decided otherwise, or somebody has changed the file."""
        return self.recorded is not None and self.recorded != self.actions


# --- writing ---


class Recorder:
    """Moves one job's membership on and writes its history down.

    A file that cannot be written any more, for instance on a full disk, ends the record and not the job.

    Args:
        file: Gets the lines, each as soon as it is known; ``None`` for no record.
        membership: Of a job that begins at second 0.
    """

    def __init__(self, file: TextIO | None, membership: Membership) -> None:
        self._file = file
        # What a replay of the lines written so far comes to, and the newest tick that is not among them: when it was
        # and what it led to. A start ticks for minutes, each tick saying no more than the one before.
        self._replayed = membership
        self._held: tuple[float, Membership] | None = None
        self._write({"format": FORMAT, "rules": asdict(membership.rules)})

    def transition(
        self, membership: Membership, event: MembershipEvent, now_s: float
    ) -> tuple[Membership, tuple[Action, ...]]:
        """``transition.transition``, recorded; ``membership`` is what the call before returned."""
        try:
            after, actions = outcome = transition(membership, event, now_s)
        except BaseException:
            # An event that the state machine does not survive is the one that somebody will want to replay.
            self.flush()
            self._write_entry(now_s, event)
            raise
        if self._file is None:
            return outcome
        if self._held is not None and transition(self._replayed, event, now_s) != outcome:
            self.flush()
        if isinstance(event, Tick) and not actions:
            self._held = None if after == self._replayed else (now_s, after)
        else:
            self._write_entry(now_s, event, actions)
            self._replayed, self._held = after, None
        return outcome

    def flush(self) -> None:
        """Write the tick that was held back, if there is one."""
        if self._held is not None:
            at_s, self._replayed = self._held
            self._held = None
            self._write_entry(at_s, Tick(), ())

    def _write_entry(self, at_s: float, event: MembershipEvent, actions: Sequence[Action] | None = None) -> None:
        followed = {} if actions is None else {"actions": [to_json(action) for action in actions]}
        self._write({"at_s": at_s, **to_json(event), **followed})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the history is not recorded any further: %s; the job goes on", error)
            with suppress(OSError):
                self._file.close()  # or it would try again when its owner closes it
            self._file = None


# --- reading ---


def read_history(path: str | Path) -> History:
    """The history in a file.

    Raises:
        UsageError: It cannot be read, or is no such history; the message names the line.
    """
    name = str(path)
    try:
        with open(name, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"cannot read the history in {name!r}: {error.strerror}; expected a file that 'edlrun --record' wrote"
        ) from error
    note = ""
    last = lines.pop()  # empty behind a complete line
    if last and lines and _is_cut_short(last):
        note = _CUT_SHORT
    elif last:
        lines.append(last)
    if not lines:
        _refuse(name, 1, UsageError("it is empty"))
    rules = _read_first(name, lines[0])
    entries: list[HistoryEntry] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            entries.append(_entry(_parse(line), earliest_s=entries[-1].at_s if entries else 0.0))
        except UsageError as error:
            _refuse(name, number, error)
    return History(rules, tuple(entries), note)


def _read_first(name: str, line: bytes) -> Rules:
    try:
        header = _parse(line)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(f'{show(header)} is no first line of a history; expected {{"format": "{FORMAT}", …}}')
        return read_fields(Rules, header.get("rules"))
    except UsageError as error:
        _refuse(name, 1, error)


def _entry(line: object, earliest_s: float) -> HistoryEntry:
    if not isinstance(line, dict):
        raise UsageError(f"{show(line)} is no entry; expected an object with 'at_s' and 'what'")
    fields = dict(line)
    at_s, actions = read_number(fields.pop("at_s", None), "'at_s'"), fields.pop("actions", None)
    if at_s < earliest_s:
        raise UsageError(f"'at_s' is {at_s}, which is before {earliest_s}; expected lines in order of time, from 0 on")
    if actions is not None and not isinstance(actions, list):
        raise UsageError(f"'actions' is {show(actions)}; expected a list")
    followed = None if actions is None else tuple(map(action_from_json, actions))
    return HistoryEntry(at_s, event_from_json(fields), followed)


def _is_cut_short(line: bytes) -> bool:
    try:
        _parse(line)
    except UsageError:
        return True
    return False


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{show(line.decode(errors='replace'))} is no JSON: {error}") from error


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _refuse(name: str, number: int, error: UsageError) -> NoReturn:
    raise UsageError(
        f"cannot read the history in {name!r}, line {number}: {error}; expected a file that 'edlrun --record' wrote"
    ) from error


# --- running again ---


def replay(history: History) -> Iterator[Decision]:
    """Each entry through the state machine, as it is today. Pure: nothing is started and nobody is told."""
    membership = begin(history.rules, 0.0)
    for entry in history.entries:
        membership, actions = transition(membership, entry.event, entry.at_s)
        yield Decision(entry.at_s, entry.event, actions, membership, entry.actions)
