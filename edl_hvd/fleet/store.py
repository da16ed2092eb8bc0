"""The file that keeps a fleet: its jobs, its claims and its history, in SQLite with a write-ahead log.

Each event is kept with what followed from it and with the jobs that it changed, in one transaction, before anything is
done about it. A daemon that is killed at any moment thus leaves a fleet that a later one goes on with. The plan is no
state: it follows from the rest.

The history has a bound. Each half of it begins with a fleet that is kept whole (a mark): when the newer half is full,
the older one is removed, a few entries with each event, and the history is decided again from the mark between them.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl_hvd.errors import StorageError, UsageError
from edl_hvd.fleet.events import FleetAction, FleetEvent, JobDeleted, event_as_json, read_action, read_event
from edl_hvd.fleet.state import Fleet, FleetJob, FleetRules, HeldClaim
from edl_hvd.hosts import HostSlots
from edl_hvd.json_values import as_fields, read_fields

FILE = "fleet.sqlite"
FORMAT = "edl_hvd fleet 1"
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_BYTES = 1 << 16
# A page for each of some jobs that change at once.
HISTORY_BYTES = 64 << 20
# Of the history, at most: a week of 50 jobs, whose entries have 8 MB a day (measured in virtual time; nine tenths of
# it are what jobs have measured). The file has a fifth more. 'fleet show' searches it within 0.3 s.
_REMOVED_AT_ONCE = 100
# Entries that are removed with one that is added: within 1 ms, and long before the next half is full.
_BUSY_S = 5.0
# A reader in another terminal holds the file for milliseconds.
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS job (name TEXT PRIMARY KEY, place INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS claim (name TEXT PRIMARY KEY, place INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    serial INTEGER PRIMARY KEY, at_s REAL NOT NULL, event TEXT NOT NULL, actions TEXT NOT NULL
);
"""


class FleetUnusableError(StorageError):
    """The file does not read, is damaged, or cannot be written."""


class FleetDiskFullError(StorageError):
    """There is no room for what happened; nothing of it is kept, and it may be kept later."""


@dataclass(frozen=True)
class FleetMoment:
    """What a store holds.

    Attributes:
        fleet: The fleet after the last event.
        at_s: When that was, on the fleet's clock.
        wall_s: The same moment since the epoch: how long no daemon ran follows from it.
    """

    fleet: Fleet
    at_s: float
    wall_s: float


@dataclass(frozen=True)
class FleetEntry:
    """One line of the history.

    Attributes:
        at_s: When it happened, on the fleet's clock.
        event: What happened.
        actions: What followed.
        before: The fleet before the oldest entry that is kept, where there were older ones; ``None`` with all others.
    """

    at_s: float
    event: FleetEvent
    actions: tuple[FleetAction, ...]
    before: Fleet | None = None


class FleetStore:
    """A fleet's file, opened by its daemon alone for writing; others read. One thread.

    Args:
        folder: Folder of the fleet's state.

    Raises:
        StorageError: The file cannot be used, or is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            # What jobs were submitted with is there, variables of their environment too: for this user alone. The
            # other files that SQLite makes have the same mode.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            # A commit survives the end of this process at any moment; one that a power failure takes is found again
            # in the folders of the jobs.
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.executescript(_TABLES)
            self._write_fact("format", FORMAT, only_first=True)
            found = self._fact("format")
            self._identity = _identity(self._path)
            self._oldest = self._number("SELECT coalesce(min(serial), 1) FROM history")
            self._begin, self._mark = (self._mark_serial(name) for name in ("begin", "mark"))
            self._new_bytes = self._number(
                "SELECT coalesce(sum(length(event) + length(actions)), 0) FROM history WHERE serial > ?", self._mark
            )
        except (OSError, sqlite3.Error, ValueError, KeyError) as error:
            raise self._unusable(error) from error
        if found != FORMAT:
            raise StorageError(f"{self._path} holds {found!r}; expected {FORMAT!r}; name another --state")

    def read(self) -> FleetMoment:
        """What was kept last.

        Raises:
            StorageError: The file does not read.
        """
        try:
            facts = {name: json.loads(self._fact(name) or "null") for name in ("rest", "at_s", "wall_s")}
            fleet = _read_fleet(facts["rest"] or {}, self._values("job"), self._values("claim"))
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            raise self._unusable(error) from error
        return FleetMoment(fleet, facts["at_s"] or 0.0, facts["wall_s"] or 0.0)

    def is_new(self) -> bool:
        """Whether nothing has ever been kept."""
        return self._fact("at_s") is None

    def keep(
        self, before: Fleet, after: Fleet, at_s: float, wall_s: float, event: FleetEvent, actions: Sequence[FleetAction]
    ) -> None:
        """Keep an event, what followed, and what it has changed. Blocks for well under a millisecond, mostly.

        Raises:
            FleetDiskFullError: There is no room for it; nothing of it is kept.
            StorageError: It cannot be written; nothing of it is kept.
        """
        try:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                entry = (_text(event_as_json(event)), _text([event_as_json(action) for action in actions]))
                serial = self._file.execute(
                    "INSERT INTO history (at_s, event, actions) VALUES (?, ?, ?)", (at_s, *entry)
                ).lastrowid
                self._write_changes("job", before.jobs, after.jobs)
                self._write_changes("claim", before.claims, after.claims)
                for name, value in (("rest", _rest_of(after)), ("at_s", at_s), ("wall_s", wall_s)):
                    self._write_fact(name, _text(value))
                new_bytes = self._new_bytes + sum(map(len, entry))
                is_marked = new_bytes >= HISTORY_BYTES // 2
                begin = self._mark if is_marked else self._begin
                if is_marked:
                    self._move_marks(serial or 0, after)
                oldest = self._remove_before(begin)
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        self._oldest, self._begin, self._new_bytes = oldest, begin, 0 if is_marked else new_bytes
        if is_marked:
            self._mark = serial or 0

    def _move_marks(self, serial: int, fleet: Fleet) -> None:
        """The history begins where its newer half began; another half begins after this entry."""
        former = self._fact("mark")
        if former is not None:
            self._write_fact("begin", former)
        self._write_fact("mark", _text({"serial": serial, "fleet": _whole(fleet)}))

    def _remove_before(self, begin: int) -> int:
        """Remove some of the entries up to this one; the oldest serial that may be left."""
        if self._oldest > begin:
            return self._oldest
        until = min(begin + 1, self._oldest + _REMOVED_AT_ONCE)
        self._file.execute("DELETE FROM history WHERE serial < ?", (until,))
        return until

    def _mark_serial(self, name: str) -> int:
        text = self._fact(name)
        return 0 if text is None else int(json.loads(text)["serial"])

    def _number(self, query: str, *values: int) -> int:
        return int(self._file.execute(query, values).fetchone()[0])

    def is_in_place(self) -> bool:
        """Whether the file is still the one that was opened; also where its folder does not answer. Takes 2 µs."""
        try:
            return _identity(self._path) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def has_room(self) -> bool:
        """Whether there is room for a large event: some is written, and removed."""
        try:
            self._write_fact("room", " " * _ROOM_BYTES)
            self._file.execute("DELETE FROM fact WHERE name = 'room'")
        except sqlite3.Error as error:
            if self._is_full(error):
                return False
            raise self._unusable(error) from error
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_changes(self, table: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name in before.keys() - after.keys():
            self._file.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
        for name, value in after.items():
            if before.get(name) is not value:
                last = f"SELECT coalesce(max(place), 0) + 1 FROM {table}"
                place = f"coalesce((SELECT place FROM {table} WHERE name = ?), ({last}))"
                self._file.execute(
                    f"INSERT OR REPLACE INTO {table} (name, place, value) VALUES (?, {place}, ?)",
                    (name, name, _text(as_fields(value))),
                )

    def _write_fact(self, name: str, value: str, only_first: bool = False) -> None:
        how = "IGNORE" if only_first else "REPLACE"
        self._file.execute(f"INSERT OR {how} INTO fact (name, value) VALUES (?, ?)", (name, value))

    def _fact(self, name: str) -> str | None:
        row = self._file.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _values(self, table: str) -> list[object]:
        rows = self._file.execute(f"SELECT value FROM {table} ORDER BY place, name").fetchall()
        return [json.loads(text) for (text,) in rows]

    def _unusable(self, error: Exception) -> StorageError:
        if self._is_full(error):
            return FleetDiskFullError(
                f"the state of the fleet in {self._path} cannot be written: the disk is full ({error}); expected some "
                f"room in {self._path.parent}; make room"
            )
        return FleetUnusableError(
            f"the state of the fleet in {self._path} cannot be used: {error}; expected a folder on a local disk that "
            "this user can write, and a file of this version; or name another --state"
        )

    def _is_full(self, error: Exception) -> bool:
        """Whether that follows from a full disk, where SQLite reports an I/O error of one of its files, too."""
        if not isinstance(error, sqlite3.Error):
            return isinstance(error, OSError) and error.errno in DISK_IS_FULL
        if "disk is full" in str(error):
            return True
        try:
            return "disk I/O error" in str(error) and os.statvfs(self._path.parent).f_bavail == 0
        except OSError:
            return False


def read_fleet_history(folder: Path, job: str = "") -> Iterator[FleetEntry]:
    """What happened to a fleet, oldest first, as far as it is kept; also while its daemon runs.

    Args:
        folder: Folder of the fleet's state.
        job: Name of a job, for the entries that tell of it or delete it, without ``before``; empty: all.

    Raises:
        UsageError: There is no such fleet, or its history does not read.
    """
    path = folder / FILE
    if not os.path.isfile(path):
        raise UsageError(
            f"{folder} holds no fleet that this user can read; expected the --state folder of 'edl-hvd fleet serve'"
        )
    try:
        file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
        try:
            file.execute("BEGIN")  # one moment of the file, whatever its daemon removes meanwhile
            row = file.execute("SELECT value FROM fact WHERE name = 'begin'").fetchone()
            mark = None if row is None else json.loads(row[0])
            before = None if mark is None or job else _read_fleet(**mark["fleet"])
            which, names = "", []
            if job:
                which = "AND (instr(actions, ?) OR event = ?)"
                names = [f'"about": {_text(job)}', _text(event_as_json(JobDeleted(job)))]
            query = f"SELECT at_s, event, actions FROM history WHERE serial > ? {which} ORDER BY serial"
            for at_s, event, actions in file.execute(query, [0 if mark is None else mark["serial"], *names]):
                followed = tuple(read_action(action) for action in json.loads(actions))
                yield FleetEntry(at_s, read_event(json.loads(event)), followed, before)
                before = None
        finally:
            file.close()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the history in {path} does not read: {error}; expected a fleet of this version") from error


def _rest_of(fleet: Fleet) -> dict[str, Any]:
    """What is kept of a fleet beside its jobs and claims."""
    return {
        "rules": as_fields(fleet.rules), "hosts": [as_fields(entry) for entry in fleet.hosts],
        "lacking": fleet.lacking, "planner_failures": fleet.planner_failures, "removing": fleet.removing,
    }  # fmt: skip


def _whole(fleet: Fleet) -> dict[str, Any]:
    """A whole fleet, as :func:`_read_fleet` takes it."""
    return {
        "rest": _rest_of(fleet), "jobs": [as_fields(one) for one in fleet.jobs.values()],
        "claims": [as_fields(one) for one in fleet.claims.values()],
    }  # fmt: skip


def _read_fleet(rest: Mapping[str, Any], jobs: Sequence[object], claims: Sequence[object]) -> Fleet:
    """The fleet of what :func:`_whole` has made."""
    return Fleet(
        rules=read_fields(FleetRules, rest["rules"]) if rest else FleetRules(),
        hosts=tuple(read_fields(HostSlots, entry) for entry in rest.get("hosts", ())),
        jobs={one.name: one for one in (read_fields(FleetJob, fields) for fields in jobs)},
        claims={one.name: one for one in (read_fields(HeldClaim, fields) for fields in claims)},
        removing=tuple(rest.get("removing", ())),  # a fleet may be older than this
        **{name: rest[name] for name in ("lacking", "planner_failures") if name in rest},
    )


def _identity(path: Path) -> tuple[int, int]:
    """Names a file on this machine for as long as it is there."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _text(value: object) -> str:
    return json.dumps(value)
