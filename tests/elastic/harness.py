"""Runs a real elastic job under stock ``horovodrun`` on this machine, with faults, and tells what came of it.

Hosts are names of the loopback interface (``localhost``, ``127.0.0.1``, ``127.1``), which Horovod takes for separate
local hosts. Everything a job leaves behind is in its folder: ``output.txt``, ``events.jsonl``, ``trace/`` (one line
per step and worker), ``reports/`` (what each worker held at the end), ``fired/`` (one file per fault that struck).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from chaos import SeededFault, inject
from faults import (
    AnyFault,
    Fault,
    HostChange,
    Interrupt,
    Outside,
    RandomKill,
    is_alive,
    mark_fired,
    save_faults,
    state_of,
)
from preloaded_edlrun import TOKEN
from prepared import PRELOADED_EDLRUN, Child, start
from thread_signals import signal_another_thread
from training import Training

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TWO_HOSTS = ("localhost:1", "127.0.0.1:1")
POLL_S = 0.02
Launcher = subprocess.Popen[bytes] | Child
# A job takes 4 to 15 s on two idle cores. Stock Horovod is expected to hang; its Gloo timeout is 30 s.
DEADLINES_S = {"edl_hvd": 300.0, "stock": 60.0}


class JobStuckError(Exception):
    """The job did not end within its deadline. Deadlines are many times what a job needs."""


@dataclass(frozen=True)
class Job:
    """A job as data.

    Attributes:
        engine: "edl_hvd" or "stock".
        hosts: Content of the hosts file at the start.
        np: The launcher's ``-np``; if left out, all slots of ``hosts``.
        min_np: Its ``--min-np``.
        faults: What goes wrong.
        training: What is trained.
        flags: More flags for ``horovodrun``.
        environment: More environment variables.
        launcher: "horovodrun" or "edlrun".
        interfaces: What ``horovodrun`` is given as ``--network-interfaces``; without, it waits for a second host.
        script: What the workers of engine "edl_hvd" run.
        own_command: Words to be run instead of a launcher's, before the job's folder.
        deadline_s: So long after its start, or after the last strike of a fault, the job is stuck; if left out,
            ``DEADLINES_S`` of its engine.
    """

    engine: str = "edl_hvd"
    hosts: tuple[str, ...] = TWO_HOSTS
    np: int | None = None
    min_np: int = 1
    faults: tuple[AnyFault, ...] = ()
    training: Training = field(default_factory=Training)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    launcher: str = "horovodrun"
    interfaces: str | None = "lo"
    own_command: tuple[str, ...] = ()
    script: str = "worker_script.py"


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        exit_code: The launcher's.
        seconds: From start to end.
        output: All its lines.
        reports: Of the workers that came to the end, by rank.
        trace: Lines of all workers in order of time.
        events: Lines of the event log.
        fired: Number of each fault that struck, to how often.
        left: Command lines of processes still there some seconds after the launcher's end.
    """

    exit_code: int
    seconds: float
    output: str
    reports: list[dict[str, Any]]
    trace: list[dict[str, Any]]
    events: list[dict[str, Any]]
    fired: dict[int, int]
    left: list[str]

    def lines(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.trace if line["what"] == what]

    def seconds_to_next_step(self) -> float:
        """From the last strike to the first step of the next world."""
        struck = max(line["t"] for line in self.lines("fired"))
        entered = min(line["t"] for line in self.lines("enter") if line["t"] > struck)
        return float(min(line["t"] for line in self.lines("step") if line["t"] > entered)) - struck

    def pauses(self, generation: int) -> list[float]:
        """Seconds between the last step before this generation and its first, of each worker that was there before."""
        lines = [line for line in self.trace if line["what"] in ("enter", "step")]
        entered = {line["pid"]: line["t"] for line in lines if line.get("generation") == generation}
        found = []
        for pid, moment in entered.items():
            steps = [line["t"] for line in lines if line["pid"] == pid and line["what"] == "step"]
            before, after = [t for t in steps if t < moment], [t for t in steps if t > moment]
            if before and after:
                found.append(after[0] - before[-1])
        return found


def run(job: Job, folder: Path, preloaded: bool = False) -> Outcome:
    """Run the job to its end. Ends every process of it, whatever happens.

    Args:
        job: What to run.
        folder: For all that it leaves behind.
        preloaded: ``edlrun`` is that of ``preloaded_edlrun.py``, whose workers import nothing.

    Raises:
        JobStuckError: It did not end by itself; the message holds the end of its output.
    """
    prepare(job, folder)
    token = uuid.uuid4().hex
    started = time.monotonic()
    with open(folder / "output.txt", "wb") as output:
        launcher = _launch(command(job, folder, preloaded), environment(job, folder, token), folder, output)
        try:
            _watch(job, folder, launcher, started)
            seconds = time.monotonic() - started
            left = _wait_until_gone(token)
        except JobStuckError as error:
            _signal_all(token, signal.SIGUSR1)  # The workers write where they stand.
            time.sleep(0.5)
            text = (folder / "output.txt").read_text(errors="replace")
            struck = sorted(os.listdir(folder / "fired"))
            raise JobStuckError(f"{error}; faults that struck: {struck}; end of its output:\n{text[-6000:]}") from None
        finally:
            _end_all(token, launcher)
    return outcome_of(folder, launcher.wait(), seconds, left)


def _launch(words: list[str], variables: dict[str, str], folder: Path, output: BinaryIO) -> Launcher:
    if words[:2] == PRELOADED_EDLRUN:
        return start(words, variables, folder, output)
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables,
        start_new_session=True, cwd=folder, preexec_fn=_end_with_parent,
    )  # fmt: skip


def prepare(job: Job, folder: Path) -> None:
    """Write what the job's processes read."""
    folder.mkdir(parents=True, exist_ok=True)
    job.training.save(folder)
    save_faults(folder, job.faults)
    write_hosts(folder, job.hosts)


def command(job: Job, folder: Path, preloaded: bool = False) -> list[str]:
    if job.own_command:
        return [*job.own_command, str(folder)]
    script = HERE / (job.script if job.engine == "edl_hvd" else "stock_script.py")
    slots = job.np or sum(int(host.partition(":")[2]) for host in job.hosts)
    program = [str(Path(sys.executable).with_name(job.launcher))]
    if preloaded and job.launcher == "edlrun" and job.engine == "edl_hvd" and "long" not in job.training.extra:
        program = PRELOADED_EDLRUN
    launcher = [*program, "-np", str(slots), "--min-np", str(job.min_np)]
    launcher += ["--max-np", "8", "--host-discovery-script", str(folder / "discover.sh")]
    if job.launcher == "horovodrun" and job.interfaces:
        launcher += ["--network-interfaces", job.interfaces]
    return [*launcher, *job.flags, sys.executable, str(script), str(folder)]


def environment(job: Job, folder: Path, token: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "EDL_HVD_"))}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # some hundred processes read the same sources
    return {
        **kept,
        TOKEN: token,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "EDL_HVD_EVENTS": str(folder / "events.jsonl"),
        **job.environment,
    }


def write_hosts(folder: Path, hosts: tuple[str, ...]) -> None:
    """Replace the hosts file in one move; the launcher reads it about once a second."""
    part = folder / "hosts.part"
    part.write_text("".join(f"{host}\n" for host in hosts))
    part.replace(folder / "hosts")
    script = folder / "discover.sh"
    if not script.exists():
        script.write_text(f"#!/bin/sh\nexec cat '{folder}/hosts'\n")
        script.chmod(0o755)


# -- the harness's own faults ---------------------------------------------------------------------------------------


def _watch(job: Job, folder: Path, launcher: Launcher, started: float) -> None:
    """Fire the harness's faults at their moments until the launcher ends. Host changes keep their order."""
    trace = _TraceReader(folder)
    numbered = [(number, fault) for number, fault in enumerate(job.faults) if not isinstance(fault, Fault)]
    changes = [entry for entry in numbered if isinstance(entry[1], HostChange)]
    queues = [queue for queue in (changes, *([entry] for entry in numbered if entry not in changes)) if queue]
    due: dict[int, float] = {}
    deadline_s = job.deadline_s or DEADLINES_S[job.engine]
    strikes = 0
    while launcher.poll() is None:
        now = time.monotonic()
        if strikes < (struck := len(os.listdir(folder / "fired"))):
            strikes, started = struck, now
        if now - started > deadline_s:
            raise JobStuckError(f"the job did not end within {deadline_s:g} s")
        trace.read()
        for queue in queues:
            number, fault = queue[0]
            moment = due.get(number) or _due(fault, folder, trace, now)
            if moment is not None:
                due[number] = moment
                if now >= moment:
                    _act(fault, folder, trace, launcher)
                    mark_fired(folder, number)
                    queue.pop(0)
        queues = [queue for queue in queues if queue]
        time.sleep(POLL_S)


def _due(fault: AnyFault, folder: Path, trace: _TraceReader, now: float) -> float | None:
    """When to act, or ``None`` while its condition does not hold yet."""
    if isinstance(fault, RandomKill):
        moment = random.Random(fault.seed).uniform(0, fault.within_s)
        return trace.moments[fault.since] + moment if fault.since in trace.moments else None
    if isinstance(fault, Interrupt):
        return now if trace.step >= fault.step else None
    assert isinstance(fault, HostChange | Outside | SeededFault)
    struck = fault.after is None or (folder / "fired" / f"{fault.after}.0").exists()
    ready = struck and trace.step >= fault.step and fault.size in (None, trace.size)
    return now + fault.delay_s if ready else None


def _act(fault: AnyFault, folder: Path, trace: _TraceReader, launcher: Launcher) -> None:
    if isinstance(fault, Interrupt):
        if fault.to_another_thread:
            signal_another_thread(launcher.pid, fault.signal_number)
        else:
            launcher.send_signal(fault.signal_number)
    elif isinstance(fault, RandomKill):
        alive = sorted((worker, pid) for worker, pid in trace.workers.items() if is_alive(pid))
        if alive:
            _, pid = random.Random(fault.seed).choice(alive)
            os.kill(pid, signal.SIGKILL)
    elif isinstance(fault, Outside):
        line = {"t": time.monotonic(), "what": "fired", "worker": "outside", "pid": 0}
        with open(folder / "trace" / "outside.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        fault.act()
    elif isinstance(fault, SeededFault):
        what = inject(fault, folder, trace.training(), lambda pid, name: _send(pid, signal.Signals[name]))
        line = {"t": time.monotonic(), "what": "fired", "worker": "outside", "pid": 0, "injected": what}
        with open(folder / "trace" / "outside.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    elif isinstance(fault, HostChange):
        dropped = set(fault.drop)
        if fault.drop_rank is not None:
            dropped.add(trace.host_of_rank[fault.drop_rank])
        slots = dict(line.split(":") for line in (folder / "hosts").read_text().split())
        slots.update(entry.split(":") for entry in fault.add)
        write_hosts(folder, tuple(f"{host}:{count}" for host, count in slots.items() if host not in dropped))


class _TraceReader:
    """Follows the workers' trace files while they grow."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
        self.size = 0
        self.moments: dict[str, float] = {}
        self.workers: dict[str, int] = {}
        self.host_of_rank: dict[int, str] = {}
        self._generation = -1
        self._members: list[tuple[str, int]] = []
        self._folder = folder / "trace"
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")  # the last line may still be being written
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                for line in whole.split(b"\n"):
                    self._take(json.loads(line))

    def training(self) -> list[tuple[str, int]]:
        """Worker and process number of the members of the newest world that live and are not stopped."""
        return [member for member in self._members if state_of(member[1]) not in "ZT"]

    def _take(self, line: dict[str, Any]) -> None:
        if line["what"] == "start":
            self.workers[line["worker"]] = line["pid"]
            self.moments.setdefault("newcomer" if "step" in self.moments else "start", line["t"])
        elif line["what"] == "step":
            self.moments.setdefault("step", line["t"])
            self.step, self.size = max(self.step, line["step"]), line["size"]
            self.host_of_rank[line["rank"]] = line["worker"].rpartition(":")[0]
        elif line["what"] == "enter":
            generation = line.get("generation", 0)
            if generation > self._generation:
                self._generation, self._members = generation, []
            if generation == self._generation:
                self._members.append((line["worker"], line["pid"]))


# -- processes ------------------------------------------------------------------------------------------------------


def _processes(token: str) -> Iterator[tuple[int, str]]:
    """Id and command line of each live process of the job."""
    mark = f"{TOKEN}={token}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield (
                        int(folder.name),
                        (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
                    )
            except OSError:  # It ended meanwhile, or belongs to someone else.
                continue


def _wait_until_gone(token: str, grace_s: float = 10.0) -> list[str]:
    """What is still there when the launcher has ended and everything had time to follow."""
    deadline = time.monotonic() + grace_s
    while (left := [line for _, line in _processes(token)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _signal_all(token: str, number: int) -> None:
    for pid, line in list(_processes(token)):
        if "_script.py" in line and "horovodrun" not in line and " env " not in line:
            _send(pid, number)


def _end_with_parent() -> None:
    """In the launcher before it starts: should the tests be killed, the launcher is told to end its job (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _end_all(token: str, launcher: Launcher) -> None:
    """Kill what is left of the job and make sure that it is gone."""
    deadline = time.monotonic() + 20
    while left := [pid for pid, _ in _processes(token)]:
        for pid in left:
            _send(pid, signal.SIGKILL)
        launcher.poll()
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} of the job cannot be ended")
        time.sleep(POLL_S)
    launcher.wait()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# -- what came of it ------------------------------------------------------------------------------------------------


def outcome_of(folder: Path, exit_code: int, seconds: float, left: list[str]) -> Outcome:
    trace = [json.loads(line) for path in folder.glob("trace/*") for line in path.read_text().splitlines(keepends=True)
             if line.endswith("\n")]  # fmt: skip
    fired: dict[int, int] = {}
    for path in (folder / "fired").iterdir():
        number = int(path.name.partition(".")[0])
        fired[number] = fired.get(number, 0) + 1
    return Outcome(
        exit_code=exit_code,
        seconds=seconds,
        output=(folder / "output.txt").read_text(errors="replace"),
        reports=_reports(folder),
        trace=sorted(trace, key=lambda line: line["t"]),
        events=_events(folder),
        fired=fired,
        left=left,
    )


def _reports(folder: Path) -> list[dict[str, Any]]:
    reports = [json.loads(path.read_text()) for path in folder.glob("reports/*.json")]
    return sorted(reports, key=lambda report: report["rank"])


def _events(folder: Path) -> list[dict[str, Any]]:
    from edl_hvd.events import read_events

    path = folder / "events.jsonl"
    return read_events(path) if path.exists() else []
