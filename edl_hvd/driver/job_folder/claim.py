"""The folder of a running job: taken by one ``edlrun`` at a time, refused to others, removed if nobody asked for it.

Other terminals find a job through the user's runtime folder (see ``settings.runtime_folders``): it holds the folders
of jobs without ``--job-dir``, and links to those of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TextIO, cast

import edl_hvd
from edl_hvd.driver.job_folder.files import (
    CHECKPOINTS,
    CONTROL,
    LOCK,
    RECORD,
    STATUS,
    JobRecord,
    JobView,
    entries,
    is_locked,
    look,
    replace_file,
    to_text,
)
from edl_hvd.driver.measurements import WorkStatus
from edl_hvd.driver.status import Status, TrainingProgress, WorkerStatus
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.process_identity import is_alive, start_token
from edl_hvd.settings import runtime_folders

_SHOWN_COMMAND = 60  # characters of it in a message
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 0.02
# One second: who looks whether the job lives holds the lock for some microseconds.
_KEPT_S = 86_400.0
# What a killed edlrun has left can be looked at for a day.
_SEEDS = 2**32 - 1
# NumPy and PYTHONHASHSEED take no more than 32 bits.


class JobFolder:
    """Held by this ``edlrun``; see :func:`claim`.

    Args:
        path: The folder.
        record: What its ``job.json`` says.
        past: What an earlier run has left, or ``None``.

    Attributes:
        named: The user asked for this folder: it is kept, and holds history and checkpoints.
        begun: How the job stands before anything has happened: what an earlier run of it knew and has left.
    """

    def __init__(self, path: Path, record: JobRecord, past: JobView | None, named: bool) -> None:
        self.path = path
        self.record = record
        self.named = named
        self._past = past
        saved = past.status.progress.saved_step if past and past.status else -1
        progress = TrainingProgress(known_step=past.known_step if past else -1, saved_step=saved)
        work = past.status.work if past and past.status else WorkStatus()
        self.begun = Status(time.time(), "starting", progress=progress, workers=self.orphans, work=work)

    @property
    def orphans(self) -> tuple[WorkerStatus, ...]:
        """Processes of an earlier run that are still there: their ``edlrun`` was killed, and they save and go."""
        if self._past is None or self._past.status is None:
            return ()
        left = (one for one in self._past.status.workers if one.pid is not None and is_alive(one.pid, one.start_token))
        return tuple(replace(one, state="orphaned", rank=None) for one in left)

    @property
    def resume_line(self) -> str:
        """The command that goes on with this job; empty if its folder is not kept."""
        return f"edlrun --resume --job-dir {shlex.quote(str(self.path))}" if self.named else ""

    def checkpoint_variable(self, own: Mapping[str, str]) -> dict[str, str]:
        """Where workers keep checkpoints, unless their environment or their script says otherwise."""
        if not self.named or own.get("EDL_HVD_CHECKPOINT"):
            return {}
        return {"EDL_HVD_CHECKPOINT": str(self.path / CHECKPOINTS)}

    def hash_variable(self, own: Mapping[str, str]) -> dict[str, str]:
        """What lets a set have one order on all workers, unless their environment says otherwise."""
        return {} if own.get("PYTHONHASHSEED") else {"PYTHONHASHSEED": str(self.record.seed)}

    def write_status(self, status: Status) -> None:
        """Replace ``status.json``. Blocks; may be called in any thread, by one at a time.

        Raises:
            OSError: It cannot be written.
        """
        replace_file(self.path / STATUS, to_text(status))

    @contextlib.contextmanager
    def history(self, record: str | None = None) -> Iterator[TextIO | None]:
        """The file for this run's history of the membership: in the folder, if it is kept, and at the path ``record``.

        ``None`` where nobody wants it.
        """
        paths = [] if record is None else [Path(record)]
        if self.named:
            name = "history.jsonl" if self.record.run == 1 else f"history-{self.record.run}.jsonl"
            paths.append(self.path / name)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
            yield cast(TextIO, TeeFile(*files)) if len(files) > 1 else next(iter(files), None)


class TeeFile(io.TextIOBase):
    """Several files that get the same text, as from ``tee``."""

    def __init__(self, *files: TextIO) -> None:
        self._files = files

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self._files:
            file.flush()

    def close(self) -> None:
        """Each of them, also where one cannot write what it still holds."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()


class JobFolderOptions(Protocol):
    """What a command line says of its job's folder; see :class:`~edl_hvd.driver.command_line.options.Options`."""

    @property
    def job_dir(self) -> str | None: ...

    @property
    def resume(self) -> bool: ...

    @property
    def command(self) -> tuple[str, ...]: ...

    @property
    def given(self) -> Mapping[str, str]: ...


@contextlib.contextmanager
def claim(options: JobFolderOptions) -> Iterator[JobFolder]:
    """Take the job's folder for as long as the block lasts; without ``--job-dir`` make one and remove it afterwards.

    Raises:
        UsageError: The folder belongs to another job, or to one that did not end and ``--resume`` was not given, or
            it cannot be used.
        PlatformError: There is no place for a folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            path = Path(options.job_dir) if options.job_dir is not None else stack.enter_context(_private_folder())
            stack.enter_context(_lock(path))
            folder = _begin(path, options)
            if folder.named:
                stack.enter_context(_registered(path))
        except PlatformError:
            raise
        except OSError as error:
            where = options.job_dir or "in the runtime folder of this user"
            raise UsageError(f"the job's folder {where} cannot be used: {error}; name another --job-dir") from error
        stack.callback(_unlink, path / CONTROL)
        yield folder


def _begin(path: Path, options: JobFolderOptions) -> JobFolder:
    """Look at what an earlier run has left, and write down that there is a new one."""
    named = options.job_dir is not None
    past = _past(path, options.resume) if named else None
    folder = JobFolder(path, _record(options, past), past, named)
    # In this order: one that is killed in between leaves what it found.
    folder.write_status(folder.begun)
    replace_file(path / RECORD, to_text(folder.record), durable=True)
    return folder


def _record(options: JobFolderOptions, past: JobView | None) -> JobRecord:
    now = time.time()
    return JobRecord(
        host=socket.gethostname(),
        pid=os.getpid(),
        start_token=start_token(os.getpid()),
        began_at_s=past.record.began_at_s if past else now,
        started_at_s=now,
        run=past.record.run + 1 if past else 1,
        command=options.command,
        flags=tuple((name, value) for name, value in options.given.items()),
        folder=os.getcwd(),
        version=edl_hvd.__version__,
        seed=(past.record.seed if past else 0) or 1 + secrets.randbelow(_SEEDS),
    )


# --- one at a time ---


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
        else:
            view = look(path)
            raise UsageError(_in_use(view) if view else f"--job-dir {path} is just being taken by another edlrun")
        yield
    finally:
        os.close(file)


def _past(path: Path, resume: bool) -> JobView | None:
    """What an earlier run has left; whoever has the lock may go on with it, or not."""
    try:
        view = look(path, is_locked=lambda path: False)
    except PlatformError as error:
        raise UsageError(f"--job-dir {path}: {error}; or name another folder") from error
    if view is None:
        return None
    # Somebody may have removed the lock under a living edlrun.
    if view.running:
        raise UsageError(_in_use(view))
    if not resume and (view.known_step > 0 or _is_filled(path / CHECKPOINTS)):
        command = textwrap.shorten(view.record.line, _SHOWN_COMMAND)
        raise UsageError(
            f"--job-dir {path} holds a job of {format_time(view.record.began_at_s)} ({command}), {_how_far(view)}; "
            "go on with --resume, or name another --job-dir"
        )
    return view


def _is_filled(folder: Path) -> bool:
    """Whether there is a checkpoint; what is hidden was only begun."""
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def _in_use(view: JobView) -> str:
    record = view.record
    return (
        f"--job-dir {view.path} is in use: edlrun runs there on host {record.host} as process {record.pid} since "
        f"{format_time(record.started_at_s)}; see 'edl-hvd status {shlex.quote(str(view.path))}', or name another "
        "--job-dir"
    )


def _how_far(view: JobView) -> str:
    reached = f"which reached step {view.known_step}" if view.known_step > 0 else "which has checkpoints"
    if view.status is None:
        reached = "whose status does not read"
    if view.status is None or view.status.end is None:
        return f"{reached} before its edlrun was killed"
    return f"{reached} and ended with exit code {view.status.end.code}"


def format_time(at: float) -> str:
    """A moment for people, in the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


# --- where other terminals look ---


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=_runtime_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _registered(path: Path) -> Iterator[None]:
    """A link for other terminals. One that cannot be made only costs them the name of the folder."""
    link = None
    with contextlib.suppress(OSError, PlatformError):
        place = tempfile.mktemp(prefix=f"{os.getpid()}-", dir=_runtime_folder())  # a link replaces nothing
        os.symlink(path, place)
        link = Path(place)
    try:
        yield
    finally:
        if link is not None:
            _unlink(link)


def _runtime_folder() -> Path:
    """This user's own, without what was left long ago.

    Raises:
        PlatformError: Somebody else has put something in its place.
    """
    folder = runtime_folders()[0]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise PlatformError(f"cannot make folder {folder}: {error.strerror}; give --job-dir") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PlatformError(
            f"{folder} belongs to user {found.st_uid} or is no folder; expected a folder of this user, {os.getuid()}; "
            "remove it, or set XDG_RUNTIME_DIR to a folder of your own"
        )
    folder.chmod(0o700)
    _remove_stale()
    return folder


def _remove_stale() -> None:
    for entry in entries():
        with contextlib.suppress(OSError):
            if time.time() - entry.lstat().st_mtime < _KEPT_S or is_locked(entry):
                continue
            if entry.is_symlink():
                entry.unlink()
            else:
                shutil.rmtree(entry)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
