"""The folder of a fleet's state: one daemon holds it, and what is said where its file and its jobs do not agree."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from edl_hvd.errors import PlatformError, StorageError, UsageError
from edl_hvd.fleet.runs import JOBS
from edl_hvd.fleet.store import FILE

_LOCK = "lock"
_SHOWN_JOBS = 8


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make the folder of a fleet's state and hold it for as long as the block lasts.

    Raises:
        UsageError: The daemon of another fleet holds it.
        PlatformError: It cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PlatformError(f"--state {folder} cannot be used: {error}; name another folder") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--state {folder} is in use by another daemon; ask that one ('edl-hvd fleet list --state {folder}'), "
                "or name another folder"
            ) from None
        yield
    finally:
        os.close(file)


def jobs_are_unknown(folder: Path, jobs: Mapping[str, int | None]) -> StorageError:
    """The error of a fleet whose jobs are there and unknown: another one would give their slots away.

    Args:
        folder: Of its state.
        jobs: Those in the folder, each with its process, if that runs.
    """
    named = [f"{job}, which runs as process {pid}" if pid else job for job, pid in jobs.items()]
    running = " ".join(str(pid) for pid in jobs.values() if pid)
    end = f"end those that run (kill {running}), then " if running else ""
    return StorageError(
        f"{folder / FILE} is empty or was removed, and {folder / JOBS} holds jobs that it should know "
        f"({_first(named)}); put the file back; or {end}move {folder / JOBS} away, or name another --state"
    )


def with_running_jobs(error: StorageError, jobs: Mapping[str, int | None]) -> StorageError:
    """The same error, with the jobs that go on: a fleet in another folder would give their slots away."""
    running = _running(jobs)
    return StorageError(f"{error}{f', after ending the jobs that go on ({running})' if running else ''}")


def file_is_gone(folder: Path, jobs: Mapping[str, int | None]) -> StorageError:
    """The error of a daemon whose file is gone: what it keeps there, no later one finds."""
    running = _running(jobs)
    return StorageError(
        f"{folder / FILE} was removed or replaced while the daemon used it; expected the file to stay; put it back and "
        f"start the daemon again{f', or end the jobs that go on ({running})' if running else ''}"
    )


def _running(jobs: Mapping[str, int | None]) -> str:
    return _first([f"{job}: kill {pid}" for job, pid in jobs.items() if pid])


def _first(entries: Sequence[str]) -> str:
    more = len(entries) - _SHOWN_JOBS
    return "; ".join(entries[:_SHOWN_JOBS]) + f"; and {more} more" * (more > 0)
