"""The faults that ``faults.py`` lets strike, one after the other, and what is measured of each.

All rows train the fault tests' ledger with plain SGD, under which a newcomer's weights stay those of the others on
stock Horovod, too. With momentum or weight decay they do not, and every row with a newcomer would only say that.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import Fault, HostChange, Outside, add_host, crash, hang, kill, pause, remove_host, stop
from harness import Job, Outcome
from judgement import judge
from ssh_hosts import HOSTS, serve
from training import Training

ONE_HOST, TWO_HOSTS = ("localhost:1",), ("localhost:1", "127.0.0.1:1")
THREE_HOSTS, TWO_SLOTS, TWO_BY_TWO = (*TWO_HOSTS, "127.1:1"), ("localhost:2",), ("localhost:2", "127.0.0.1:2")
OLD, NEW = "localhost:0", "127.0.0.1:0"
# Reserved for documentation (RFC 5737): nobody answers there.
NOBODY = "192.0.2.1"
# A world may come when nothing is left to train.
RESUMES = ("step", "end")
# Of ``torchrun_script.py``: the last step before a snapshot.
LATE_STEP = 24


@dataclass(frozen=True)
class Place:
    """Where one job runs.

    Attributes:
        launcher: "horovodrun", "edlrun" or "torchrun".
        folder: The job's, not there yet.
        more: What has to be ended after the job.
        deadline_s: Seconds after its start, or after the fault, from which the job is stuck.
    """

    launcher: str
    folder: Path
    more: contextlib.ExitStack
    deadline_s: float

    def job(self, hosts: tuple[str, ...], *faults: Any, training: Training | None = None, **fields: Any) -> Job:
        """A job of this launcher; under ``horovodrun`` its script is written as Horovod's documentation has it."""
        engine = "stock" if self.launcher == "horovodrun" else "edl_hvd"
        training = replace(training or Training(), optimizer="plain")
        fields |= {"launcher": self.launcher, "deadline_s": self.deadline_s}
        return Job(engine, hosts, faults=faults, training=training, **fields)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: For ``--cases``.
        event: What happens.
        job: Makes the job.
        seconds: What is measured; ``None``: nothing, the job only has to end well.
        judge: What went wrong, in words; nothing if the job recovered.
        torchrun: Number of workers and fault of the same case under ``torchrun``, if it exists there.
    """

    name: str
    event: str
    job: Callable[[Place], Job]
    seconds: Callable[[Outcome], float] | None = None
    judge: Callable[[Place, Job, Outcome], str] = lambda _, job, outcome: judge(job, outcome)
    torchrun: tuple[int, Fault] | None = None


# --- what is measured ----------------------------------------------------------------------------------------------


def next_step(outcome: Outcome) -> float:
    """From the last fault to the first step of the next world, or to its end if nothing was left to train."""
    struck = max(line["t"] for line in outcome.lines("fired"))
    entered = min(line["t"] for line in outcome.lines("enter") if line["t"] > struck)
    return float(min(line["t"] for line in outcome.trace if line["what"] in RESUMES and line["t"] > entered)) - struck


def next_new_step(outcome: Outcome) -> float:
    """From the fault to the first step that had not been done before."""
    struck = outcome.lines("fired")[0]["t"]
    known = max(line["step"] for line in outcome.lines("step") if line["t"] <= struck)
    return float(min(line["t"] for line in outcome.lines("step") if line["step"] > known)) - struck


def without_a_step(outcome: Outcome) -> float:
    """For how long a worker that was there before did not train while worlds changed; of all the longest."""
    waits: dict[int, float] = {}
    last: dict[int, float] = {}
    entering: set[int] = set()
    for line in outcome.trace:
        pid = line["pid"]
        if line["what"] == "enter":
            entering.add(pid)
        elif line["what"] in RESUMES:
            if pid in entering and pid in last:
                waits[pid] = waits.get(pid, 0.0) + line["t"] - last[pid]
            entering.discard(pid)
            last[pid] = line["t"]
    return max(waits.values())


def longest_gap(outcome: Outcome) -> float:
    """Between two steps of anybody, or the last one and the end."""
    moments = [line["t"] for line in outcome.trace if line["what"] in RESUMES]
    return max(after - before for before, after in itertools.pairwise(moments))


# --- what befalls the discovery script, the driver and its ports -----------------------------------------------------


def discovery_says(place: Place, script: str) -> None:
    """Replace the discovery script in one move."""
    part = place.folder / "discover.part"
    part.write_text(f"#!/bin/sh\n{script}\n")
    part.chmod(0o755)
    part.replace(place.folder / "discover.sh")


def blip_and_kill(place: Place, script: str) -> Job:
    """The discovery script does something else; three seconds (three polls) later a worker is killed."""
    change = Outside(lambda: discovery_says(place, script), step=5)
    polled = Outside(lambda: None, after=0, delay_s=3.0)
    return place.job(TWO_HOSTS, change, polled, kill(rank=1, after=1))


def process_of(place: Place, worker: str) -> int:
    """Process number of a worker that has started once."""
    (trace,) = (place.folder / "trace").glob(f"{worker.replace(':', '.')}.*.jsonl")
    return int(trace.suffixes[-2].removeprefix("."))


def driver_of(place: Place) -> int:
    """Process number of the job's launcher: of those that carry its words the one that started the others."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes()
                if str(place.folder).encode() in words and f"/{place.launcher}\0".encode() in words:
                    found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return next(pid for pid, parent in found.items() if parent not in found)


def ports_of(pid: int) -> list[int]:
    """Where the process listens."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


class Planted:
    """Loading its pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def put_from_a_stranger(place: Place) -> None:
    """To every port on which the driver listens, what makes stock Horovod's load a pickle."""
    body = base64.b64encode(pickle.dumps(Planted(planted_in(place))))
    ports = ports_of(driver_of(place))
    if len(ports) < (2 if place.launcher == "edlrun" else 1):
        raise RuntimeError(f"the driver of {place.folder} listens on {ports}, too few to have met its servers")
    for port in ports:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("PUT", f"/worker_addresses/{OLD}", body)
            connection.getresponse()


def planted_in(place: Place) -> Path:
    return place.folder.with_name("planted")


def judge_stranger(place: Place, job: Job, outcome: Outcome) -> str:
    return "code runs in the driver" if planted_in(place).exists() else judge(job, outcome)


def kill_driver(place: Place) -> Job:
    server_folder = place.folder.with_name("ssh")
    server_folder.mkdir()
    server = place.more.enter_context(serve(server_folder))
    checkpoints = str(place.folder.with_name("checkpoints")) if place.launcher == "edlrun" else None
    training = Training(epochs=10**6, pause_s=0.05, checkpoint=checkpoints)
    death = Outside(lambda: os.kill(driver_of(place), signal.SIGKILL), step=20)
    path = os.pathsep.join([str(server.tools), os.environ["PATH"]])
    hosts = (f"{HOSTS[0]}:1", f"{HOSTS[1]}:1")
    return place.job(hosts, death, training=training, environment={"PATH": path})


def judge_orphans(place: Place, job: Job, outcome: Outcome) -> str:
    """The harness has waited ten seconds for them."""
    killed = outcome.lines("fired")[0]["t"]
    unattended = {line["pid"] for line in outcome.lines("step") if line["t"] > killed + 9}
    if unattended:
        return f"{len(unattended)} workers train on 10 s later"
    if outcome.left:
        return f"{len(outcome.left)} processes are left 10 s later"
    last = max(line["step"] for line in outcome.lines("step"))
    manifests = Path(job.training.checkpoint or "/nowhere").glob("checkpoints/*/manifest.json")
    saved = max((int(manifest.parent.name) for manifest in manifests), default=0)
    return "" if saved >= last else f"step {last} is lost, the checkpoint is of {saved}"


# --- the rows --------------------------------------------------------------------------------------------------------


def last_old_worker_dies(place: Place) -> Job:
    training = Training()
    if place.launcher == "edlrun":  # stock Horovod has no checkpoints
        training = Training(checkpoint=str(place.folder.with_name("checkpoints")), checkpoint_every="4 steps")
    return place.job(ONE_HOST, add_host("127.0.0.1:1", step=5), kill(worker=OLD, at="sync", size=2), training=training)


def dies_with_a_place(place: Place) -> Job:
    """A second worker dies when it has been given its place in the new world, and the last one waits for it."""
    first = kill(worker="127.1:0", step=7)
    if place.launcher == "edlrun":
        return place.job(THREE_HOSTS, first, kill(worker=NEW, at="rendezvous", after=0))
    # Stock Horovod gives places inside hvd.init(), once all have asked. So the last one asks late; meanwhile the other,
    # which has asked, is stopped, and dies when the last one waits for it.
    late = pause(3.0, worker=OLD, at="rendezvous", after=0)
    stopped = Outside(lambda: os.kill(process_of(place, NEW), signal.SIGSTOP), after=1, delay_s=1.5)
    death = Outside(lambda: os.kill(process_of(place, NEW), signal.SIGKILL), after=2, delay_s=3.0)
    return place.job(THREE_HOSTS, first, late, stopped, death)


def late_newcomer(place: Place) -> Job:
    faults = add_host("127.0.0.1:1", step=5), pause(8.0, worker=NEW, at="start")
    return place.job(ONE_HOST, *faults, training=Training(until_size=2), flags=("--gloo-timeout-seconds", "5"))


def grow(place: Place, hosts: tuple[str, ...], size: int, *more: HostChange) -> Job:
    return place.job(hosts, *more, training=Training(until_size=size))


CASES = (
    Case("kill", "SIGKILL of one of 4 workers, 2 hosts x 2", lambda place: place.job(TWO_BY_TWO, kill(rank=3, step=7)),
         next_step, torchrun=(4, kill(rank=3, step=LATE_STEP))),
    Case("crash", "crash of one of 2 workers on a single host",
         lambda place: place.job(TWO_SLOTS, crash(rank=1, step=7)), next_step,
         torchrun=(2, crash(rank=1, step=LATE_STEP))),
    Case("single", "a single host, no --network-interfaces", lambda place: place.job(TWO_SLOTS, interfaces=None)),
    Case("add", "a host is added, 1 -> 2 workers *",
         lambda place: grow(place, ONE_HOST, 2, add_host("127.0.0.1:1", step=5)), without_a_step),
    Case("add-two", "a host is added, 2 -> 4 workers *",
         lambda place: grow(place, TWO_SLOTS, 4, add_host("127.0.0.1:2", step=5)), without_a_step),
    Case("remove", "a host is removed, 2 -> 1 workers *",
         lambda place: place.job(TWO_HOSTS, remove_host("127.0.0.1", step=5),
                                 training=Training(until_size=1, linger_s=3)), without_a_step),
    Case("two-changes", "two hosts are added within a second *",
         lambda place: grow(place, ONE_HOST, 3, add_host("127.0.0.1:1", step=5), add_host("127.1:1", delay_s=0.9)),
         without_a_step),
    Case("below-min", "removal below --min-np, then another host *",
         lambda place: place.job(TWO_HOSTS, remove_host("127.0.0.1", step=5), add_host("127.1:1", after=0, delay_s=3.0),
                                 training=Training(until_size=2), min_np=2), without_a_step),
    Case("twice", "one of 3 dies, another as the rest meet", dies_with_a_place, next_step),
    Case("stray-word", "discovery prints a stray word, then SIGKILL",
         lambda place: blip_and_kill(place, f"echo hello; exec cat '{place.folder}/hosts'"), next_step),
    Case("replace", "all hosts are replaced at once **",
         lambda place: place.job(TWO_HOSTS, HostChange(add=("127.1:1",), drop=("localhost", "127.0.0.1"), step=5),
                                 training=Training(until_size=1)), longest_gap),
    Case("discovery-hangs", "discovery hangs, then SIGKILL",
         lambda place: blip_and_kill(place, "exec sleep 1000"), next_step),
    Case("hang", "a worker hangs in user code", lambda place: place.job(TWO_HOSTS, hang(worker=NEW, step=7)),
         next_step, torchrun=(2, hang(rank=1, step=LATE_STEP))),
    Case("stop", "SIGSTOP of a worker", lambda place: place.job(TWO_HOSTS, stop(worker=NEW, step=7)),
         next_step, torchrun=(2, stop(rank=1, step=LATE_STEP))),
    Case("last-old", "last old worker dies while a new one syncs", last_old_worker_dies, next_step),
    Case("late", "a start of 8 s, Gloo timeout of 5 s *", late_newcomer, without_a_step),
    Case("unreachable", "one of 2 hosts is unreachable at the start",
         lambda place: place.job(("localhost:1", f"{NOBODY}:1"), np=1)),
    Case("driver", "the driver is killed, workers behind ssh", kill_driver, judge=judge_orphans),
    Case("stranger", "a stranger sends one PUT",
         lambda place: place.job(TWO_HOSTS, Outside(lambda: put_from_a_stranger(place), step=5)), judge=judge_stranger),
)  # fmt: skip


def torchrun_job(place: Place, case: Case) -> Job:
    """The case under ``torchrun``: all workers start again, from the newest snapshot."""
    assert case.torchrun is not None
    workers, fault = case.torchrun
    words = (str(Path(sys.executable).with_name("torchrun")), "--nnodes", "1:1", "--nproc-per-node", str(workers),
             "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
             str(Path(__file__).with_name("torchrun_script.py")))  # fmt: skip
    # In a store that outlives a start, the next one finds old addresses and gives up (pytorch issue 135712).
    variables = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job("stock", faults=(fault,), own_command=words, environment=variables, deadline_s=place.deadline_s)
