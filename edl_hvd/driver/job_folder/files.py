"""The files in a job's folder, and what they say of the job: for its own driver, a later one, and other terminals.

job.json       who runs the job, since when, with which command
status.json    how it stands
lock           locked as long as its edlrun lives
control        the socket that takes requests, see requests.py
history.jsonl  what happened to the membership; a later run writes history-2.jsonl, and so on
checkpoints/   the workers' checkpoints, unless the script or the environment says where they go
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edl_hvd.driver.status import Status
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.json_values import formerly, read_fields
from edl_hvd.process_identity import is_alive
from edl_hvd.settings import runtime_folders

RECORD, STATUS, LOCK, CONTROL, CHECKPOINTS = "job.json", "status.json", "lock", "control", "checkpoints"
_ELSEWHERE_S = 30.0
# Not every network file system tells one host about another's locks; a status that is written every second does.


@dataclass(frozen=True)
class JobRecord:
    """Who runs a job: the content of ``job.json``.

    Attributes:
        host: Where its ``edlrun`` runs.
        pid: Of that ``edlrun``.
        start_token: Names it together with ``pid``; see ``process_identity.py``.
        began_at_s: When the job was first started, in seconds since the epoch.
        started_at_s: When this ``edlrun`` was.
        run: Counts the times that the job was started.
        command: What each worker runs.
        flags: Those of ``edlrun``, by their long names, as ``read_options`` takes them.
        folder: Where all of that was typed.
        version: Of ``edl_hvd``.
        seed: What the workers' random numbers begin with, in [1, 2**32); 0 where an earlier version has drawn none.
    """

    host: str
    pid: int
    start_token: str = field(metadata=formerly("mark"))
    began_at_s: float = field(metadata=formerly("began_at"))
    started_at_s: float = field(metadata=formerly("started_at"))
    run: int
    command: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    folder: str
    version: str
    seed: int = 0

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


@dataclass(frozen=True)
class JobView:
    """A job as its folder shows it.

    Attributes:
        path: The folder.
        record: Who runs it.
        status: How it stood last; ``None`` before anything happened, or if the file does not read.
        damaged: The file ``status.json`` is there and does not read.
        running: Its ``edlrun`` lives.
    """

    path: Path
    record: JobRecord
    status: Status | None
    damaged: bool
    running: bool

    @property
    def dead(self) -> bool:
        """Its ``edlrun`` has ended without a word: it was killed, or its machine went down."""
        return not self.running and (self.status is None or self.status.end is None)

    @property
    def known_step(self) -> int:
        """The furthest step it is known to have reached; -1 for none.

        A status that does not read, as after a power failure, counts as some progress: to start anew must then be
        somebody's wish.
        """
        if self.status is None:
            return 1 if self.damaged else -1
        return self.status.progress.known_step


def is_locked(path: Path) -> bool:
    """Whether a living ``edlrun`` holds this folder, as far as its lock tells."""
    try:
        file = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # For an instant this keeps an edlrun from starting, which tries again therefore.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def look(path: Path, is_locked: Callable[[Path], bool] = is_locked) -> JobView | None:
    """The job in this folder, or ``None`` if there is none.

    Args:
        path: The folder.
        is_locked: Whether somebody holds it; who holds it asks no one.

    Raises:
        PlatformError: There is one, and its ``job.json`` does not read.
    """
    try:
        text = (path / RECORD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PlatformError(f"cannot read {path / RECORD}: {error.strerror}; expected a folder of this user") from error
    try:
        record = read_fields(JobRecord, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise PlatformError(
            f"cannot read {path / RECORD}: {error}; expected what edlrun --job-dir writes, of this version"
        ) from error
    status, damaged = _read_status(path)
    return JobView(path, record, status, damaged, _is_running(is_locked(path), record, status))


def jobs_of_user() -> list[JobView]:
    """This user's jobs on this machine that run, or whose ``edlrun`` is dead; the newest first."""
    views: dict[Path, JobView] = {}
    for entry in entries():
        with suppress(OSError, PlatformError):
            view = look(entry.resolve())
            if view is not None:
                views[view.path] = view
    ordered = sorted(views.values(), key=lambda view: -view.record.started_at_s)
    return [view for view in ordered if view.running or view.dead]


def entries() -> Iterator[Path]:
    """What stands for jobs in this user's runtime folders: the folder of a job, or a link to it."""
    for folder in runtime_folders():
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                # Discovery scripts keep their answers in files of the same folder.
                yield from (entry for entry in sorted(folder.iterdir()) if entry.is_dir())


def replace_file(path: Path, text: str, durable: bool = False) -> None:
    """Put new content into a file in one move; ``durable`` survives a power failure. Blocks.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)


def to_text(value: JobRecord | Status) -> str:
    """As the content of its file."""
    return json.dumps(asdict(value), indent=1) + "\n"


def _read_status(path: Path) -> tuple[Status | None, bool]:
    try:
        return read_fields(Status, json.loads((path / STATUS).read_bytes())), False
    except OSError:
        return None, False
    except (ValueError, RecursionError, UsageError):
        return None, True


def _is_running(locked: bool, record: JobRecord, status: Status | None) -> bool:
    if locked:
        return True
    if record.host == socket.gethostname():
        return is_alive(record.pid, record.start_token)
    if status is None or status.end is not None:
        return False
    return abs(time.time() - status.at_s) < _ELSEWHERE_S
