"""The processes of a fleet's jobs: each is an ``edlrun`` of its own, in a session of its own and a folder of its own.

    jobs/resnet50/hosts        hosts that the job has now; its edlrun reads them five times a second
    jobs/resnet50/output.log   what its edlrun and its workers have printed, of all runs
    jobs/resnet50/...          what edlrun --job-dir keeps: status, history, checkpoints

A run is started in two steps. A shell is started, and waits; its process number is kept; then it is told to become
``edlrun``. A daemon that is killed in between leaves a shell whose input ends, and which ends without doing anything.
So there is no moment at which a job runs that nobody knows of.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl_hvd.driver.job_folder.files import RECORD, STATUS, JobView, look, replace_file
from edl_hvd.driver.status import Status
from edl_hvd.errors import PlatformError
from edl_hvd.fleet.state import FleetJob, JobSpec, as_hosts
from edl_hvd.hosts import HostSlots, format_hosts_file
from edl_hvd.process_identity import is_alive, start_token
from edl_hvd.settings import FAMILY_TIMINGS
from edl_hvd.timings import Timing, timings_text

JOBS, HOSTS, OUTPUT = "jobs", "hosts", "output.log"
_GATE = 'read -r go && exec "$@" </dev/null'
_OF_ONE_JOB = ("EDL_HVD_CHECKPOINT", "EDL_HVD_EVENTS", "EDL_HVD_TAKE_OVER", FAMILY_TIMINGS)
# Variables that say where a job's files are: from the daemon they would be the same for all jobs.
_DELETED = ".deleted-"
# No job's name begins like this.
_SHOWN_LINES = 3
_TAIL_BYTES = 8192


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its exit code, ``None`` if it was killed; and a sentence for people."""

    code: int | None
    how: str


@dataclass(frozen=True)
class RunView:
    """A run as its folder shows it.

    Attributes:
        status: Content of ``status.json``; ``None`` before this run has written one.
        occupied: Where its processes are: of each host as many slots as the highest one that has a process needs.
    """

    status: Status | None
    occupied: tuple[HostSlots, ...]


class Runs:
    """Starts and ends runs, and looks at them. One thread.

    Args:
        folder: Folder of the fleet's state.
        environment: Variables that each job gets from the daemon.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder / JOBS
        self._environment = {name: text for name, text in environment.items() if name not in _OF_ONE_JOB}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, tuple[tuple[int, ...], JobView | None]] = {}

    def folder_of(self, job: str) -> Path:
        """The folder of a job."""
        return self._folder / job

    def found(self) -> dict[str, int | None]:
        """The jobs whose folders are there, and the process number of each one's ``edlrun``; ``None``: it has ended."""
        jobs: dict[str, int | None] = {}
        for record in sorted(self._folder.glob(f"*/{RECORD}")):
            with contextlib.suppress(PlatformError):
                view = look(record.parent)
                jobs[record.parent.name] = view.record.pid if view is not None and view.running else None
        return jobs

    def write_hosts(self, job: str, hosts: tuple[HostSlots, ...]) -> None:
        """Replace a job's hosts file, unless it is so already.

        Raises:
            OSError: It cannot be written.
        """
        path, text = self.folder_of(job) / HOSTS, format_hosts_file(hosts)
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return
        replace_file(path, text)

    def prepare(self, job: FleetJob, family: Sequence[Timing] = ()) -> subprocess.Popen[bytes]:
        """Start a job's process, which waits until :meth:`let_go`.

        Args:
            job: The job.
            family: How long steps took in other jobs of its family.

        Raises:
            OSError: It cannot be started; or its folder, or what is in it, cannot be made.
        """
        folder, spec = self.folder_of(job.name), job.spec
        self._drop(job.name)
        folder.mkdir(parents=True, exist_ok=True)
        self.write_hosts(job.name, job.listed)
        variables = dict(text.split("=", 1) for text in spec.variables)
        if family:
            variables[FAMILY_TIMINGS] = timings_text(family)
        with open(folder / OUTPUT, "ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _GATE, f"fleet job {job.name}", *edlrun_command(spec, folder)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=spec.folder,
                env={**self._environment, **variables}, start_new_session=True,
            )  # fmt: skip
        self._children[job.name] = child
        return child

    def _drop(self, job: str) -> None:
        """Let go of an earlier process of a job; one that still waits, because its start was not kept, ends."""
        child = self._children.pop(job, None)
        if child is not None and child.stdin is not None and not child.stdin.closed:
            child.kill()
            child.stdin.close()
            child.wait()

    def remove(self, job: str) -> None:
        """Remove the folder of a job that is deleted. Returns at once; large files are deleted beside the daemon.

        Raises:
            OSError: It cannot be moved away.
        """
        self.forget(job)
        self._drop(job)
        if self.folder_of(job).exists():
            place = tempfile.mkdtemp(prefix=_DELETED, dir=self._folder)
            os.rename(self.folder_of(job), Path(place) / job)
            _delete(Path(place))

    def forget(self, job: str) -> None:
        """Keep nothing of what a job's folder shows; another look reads it again."""
        self._read.pop(job, None)

    def clear_deleted(self) -> None:
        """Delete what an earlier daemon has moved away."""
        for place in self._folder.glob(f"{_DELETED}*"):
            _delete(place)

    def let_go(self, child: subprocess.Popen[bytes]) -> None:
        """Let a process that was prepared become ``edlrun``."""
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # it was killed meanwhile, which shows at its end
            child.stdin.write(b"go\n")
            child.stdin.close()

    def signal(self, job: FleetJob, number: signal.Signals) -> None:
        """Send a signal to a job's ``edlrun``, if that is still there."""
        with contextlib.suppress(OSError):
            # The descriptor is that of this process for good, whatever its number is used for later.
            process = os.pidfd_open(job.pid)
            try:
                if start_token(job.pid) == job.start_token:
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    def ended(self, job: FleetJob) -> RunEnd | None:
        """How a job's run has ended; ``None`` while it is there."""
        child = self._children.get(job.name)
        code = child.poll() if child is not None and child.pid == job.pid else None
        if is_alive(job.pid, job.start_token):
            return None
        view = self._own_view(job)
        if view is not None and view.status is not None and view.status.end is not None:
            end = view.status.end
            return RunEnd(end.code, end.reason or ("training is complete" if end.code == 0 else "it gave no reason"))
        if code is not None and code >= 0:
            return RunEnd(code, self.last_words(job.name) or f"edlrun ended with exit code {code}")
        how = "edlrun was killed" if view is not None else "edlrun ended before it began"
        return RunEnd(None, how)

    def view(self, job: FleetJob) -> RunView:
        """How a job's run stands."""
        view = self._own_view(job) if job.pid else self._view(job.name)
        status = None if view is None else view.status
        if status is None:
            return RunView(None, ())
        there = [one for one in status.workers if one.state != "empty"]
        if not job.pid or status.end is not None:  # nobody looks after them any more
            there = [one for one in there if one.pid is not None and is_alive(one.pid, one.start_token)]
        counts: dict[str, int] = {}
        try:
            for one in there:
                host, _, slot = one.worker.rpartition(":")
                counts[host] = max(counts.get(host, 0), int(slot) + 1)
            return RunView(status, as_hosts(counts))
        except ValueError:  # no edlrun has written that; its slots stay as they are
            return RunView(status, job.occupied)

    def last_words(self, job: str) -> str:
        """The last lines that a job has printed, as one."""
        return " · ".join(line.strip() for line in last_lines(self.folder_of(job), _SHOWN_LINES))

    def _own_view(self, job: FleetJob) -> JobView | None:
        """What this run has written, and not an earlier one."""
        view = self._view(job.name)
        if view is None or (view.record.pid, view.record.start_token) != (job.pid, job.start_token):
            return None
        return view

    def _view(self, job: str) -> JobView | None:
        """What is in a job's folder; read anew only if it has changed."""
        folder = self.folder_of(job)
        try:
            found = [(folder / name).stat() for name in (RECORD, STATUS)]
        except OSError:
            return None
        stamp = tuple(number for one in found for number in (one.st_mtime_ns, one.st_ino, one.st_size))
        known = self._read.get(job)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            view = look(folder, is_locked=lambda path: False)
        except PlatformError:
            view = None
        self._read[job] = (stamp, view)
        return view


def last_lines(folder: Path, number: int) -> list[str]:
    """The last lines that the job of this folder has printed, without empty ones; none where it has printed nothing."""
    try:
        with open(folder / OUTPUT, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-number:]


def _delete(folder: Path) -> None:
    threading.Thread(target=shutil.rmtree, args=(folder, True), name="edl_hvd delete", daemon=True).start()


def edlrun_command(spec: JobSpec, folder: Path) -> list[str]:
    """The words of a job's ``edlrun``. It goes on with what an earlier run has left in the folder.

    There is no ``--max-np``: the hosts file never has more slots than the job may have, which is changed while it runs.
    """
    resume = ["--resume"] if (folder / RECORD).exists() else []
    quoted = str(folder / HOSTS).replace("\\", "\\\\").replace('"', '\\"')
    return [
        sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", str(spec.least), "--min-np", str(spec.least),
        "--discover", f'file:"{quoted}"', "--job-dir", str(folder), *resume, *spec.flags, *spec.command,
    ]  # fmt: skip
