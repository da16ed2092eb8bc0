"""The nodes of a Slurm job as hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, HostDetails, Source
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.settings import process_environment

COMMAND_S = 10.0
# Seconds: Slurm's own limit for a message (MessageTimeout).
STDERR_CHARACTERS = 300
# One or two lines of scontrol.

_GONE = ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "POWERED_DOWN", "POWERING_DOWN")
# scontrol(1), "NODE STATES". A node that drains finishes its work; no new work should start there.
_FLAG_MARKS = "*~#!%$@^-+"
# One of these after a state adds to it, e.g. '*' for a node that does not respond.
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?=\s+\[|\s+\w+=|\s*$)")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class SlurmNode:
    """A node as ``scontrol show node`` describes it."""

    name: str
    state: str
    reason: str
    features: str

    @property
    def is_gone(self) -> bool:
        return any(word.rstrip(_FLAG_MARKS) in _GONE for word in self.state.split("+"))


class Slurm(Source):
    """The nodes of an allocation that Slurm has not taken out of service.

    ``scontrol show hostnames`` expands the list of nodes, and ``scontrol show node`` prints their states. A node in
    DOWN, DRAIN or FAIL, in any combination, is left out with Slurm's reason.

    Args:
        nodelist: List of nodes in Slurm's form, e.g. "gpu[01-04,07]".
        slots: Number of slots of each node in the order of the list; a single number stands for all.
        environ: Environment for ``scontrol``, which is looked up on its ``PATH``.
    """

    def __init__(self, nodelist: str, slots: tuple[int, ...], environ: Mapping[str, str]) -> None:
        self._nodelist = nodelist
        self._slots = slots
        self._environ = environ
        self._names: tuple[str, ...] = ()

    def answer(self) -> Answer:
        self._names = self._names or tuple(self._run("show", "hostnames", self._nodelist).split())
        slots = self._slots * len(self._names) if len(self._slots) == 1 else self._slots
        if len(slots) != len(self._names):
            raise DiscoveryError(f"Slurm lists {len(self._names)} nodes, with slots for {len(slots)}; give --slots")
        nodes = parse_nodes(self._run("--oneliner", "show", "node", self._nodelist))
        unknown = [name for name in self._names if name not in nodes]
        if unknown:
            raise DiscoveryError(f"scontrol show node says nothing of {', '.join(unknown)}; its answer may be cut off")
        here = {name: nodes[name] for name in self._names if not nodes[name].is_gone}
        return Answer(
            tuple(HostSlots(name, count) for name, count in zip(self._names, slots, strict=True) if name in here),
            details={name: HostDetails(kind=node.features) for name, node in here.items()},
            left_out={
                name: f"it is {nodes[name].state}" + (f": {nodes[name].reason}" if nodes[name].reason else "")
                for name in self._names
                if name not in here
            },
        )

    def _run(self, *words: str) -> str:
        program = shutil.which("scontrol", path=self._environ.get("PATH"))
        if program is None:
            raise DiscoveryError("there is no program 'scontrol' on PATH; run this where Slurm's commands are")
        command = " ".join(("scontrol", *words))
        try:
            done = subprocess.run(
                [program, *words],
                env={**self._environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired as error:
            raise DiscoveryError(
                f"'{command}' did not end within {COMMAND_S:g} s; Slurm's controller is slow"
            ) from error
        except OSError as error:
            raise DiscoveryError(f"'{command}' cannot be started: {error.strerror}") from error
        if done.returncode or not done.stdout.strip():
            words_s = " ".join(done.stderr.split())[-STDERR_CHARACTERS:] or "no words"
            raise DiscoveryError(f"'{command}' ended with exit code {done.returncode}: {words_s}")
        return done.stdout


# --- Slurm's answers: pure ---


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """Read the output of ``scontrol --oneliner show node``: one line per node of ``Name=value`` words, the reason last.

    >>> line = "NodeName=gpu01 Gres=gpu:a100:4 State=MIXED+DRAIN Reason=fan failed [root@2026-01-31T12:00:00]"
    >>> node = parse_nodes(line + chr(10))["gpu01"]
    >>> node.state, node.reason, node.is_gone
    ('MIXED+DRAIN', 'fan failed', True)

    Raises:
        DiscoveryError: A line has no name or no state, or the last one is incomplete.
    """
    if not text.endswith("\n"):
        raise DiscoveryError(f"scontrol's answer ends in the middle of the line {text[-60:]!r}")
    nodes = {}
    for line in filter(str.strip, text.splitlines()):
        words = dict(re.findall(r"(?:^|\s)(NodeName|State|Gres)=(\S+)", line))
        if "NodeName" not in words or "State" not in words:
            raise DiscoveryError(f"scontrol's line {line[:80]!r} is not understood; expected NodeName=... State=...")
        reason = _REASON.search(line)
        gres = words.get("Gres", "")
        nodes[words["NodeName"]] = SlurmNode(
            words["NodeName"], words["State"], reason[1] if reason else "", "" if gres == "(null)" else gres
        )
    return nodes


def slots_of_nodes(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Read slots from the variables of a job: GPUs per node, else tasks per node (sbatch(1), "OUTPUT ENVIRONMENT").

    >>> slots_of_nodes({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_TASKS_PER_NODE": "1(x2)"})
    (4,)
    >>> slots_of_nodes({"SLURM_TASKS_PER_NODE": "2(x3),1"})
    (2, 2, 2, 1)

    Raises:
        UsageError: No variable is set, or one is not understood.
    """
    for name, count in (
        ("SLURM_GPUS_PER_NODE", count_gpus),
        ("SLURM_GPUS_ON_NODE", count_gpus),
        ("SLURM_JOB_GPUS", count_listed),
    ):
        if environ.get(name):
            gpus = count(environ[name])
            if gpus is None:
                raise UsageError(f"{name}={environ[name]!r} is not understood; give --slots")
            if gpus:
                return (gpus,)
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    found = [_TASKS.fullmatch(part) for part in tasks.split(",")]
    if not tasks or not all(found):
        given = f"SLURM_TASKS_PER_NODE={tasks!r} is not understood" if tasks else "Slurm names neither GPUs nor tasks"
        raise UsageError(f"{given}; give --slots, or ask Slurm for --gpus-per-node")
    return tuple(int(one[1]) for one in found if one for _ in range(int(one[2] or 1)))


def count_gpus(text: str) -> int | None:
    """Count the GPUs of "4", "a100:4", "gpu:a100:4" or several of these with commas; ``None`` for other texts.

    >>> count_gpus("gpu:a100:4(S:0-1)"), count_gpus("a100:2,v100:1"), count_gpus("many")
    (4, 3, None)
    """
    counts = [part.rpartition(":")[2] for part in re.sub(r"\([^)]*\)", "", text).split(",")]
    return sum(map(int, counts)) if all(count.isascii() and count.isdecimal() for count in counts) else None


def count_listed(text: str) -> int | None:
    """Count a list of numbers such as "0,2-3"; ``None`` for other texts.

    >>> count_listed("0,2-3"), count_listed("3-0")
    (3, None)
    """
    ends = [re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part) for part in text.split(",")]
    counts = [int(end[2] or end[1]) - int(end[1]) + 1 if end else 0 for end in ends]
    return sum(counts) if min(counts) > 0 else None


# --- from flags ---

FLAGS, BARE_FLAG = ("nodelist", "slots", *REMOTE_FLAGS), "nodelist"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_slurm``."""
    environ = process_environment()
    nodelist = flags.text("nodelist", environ.get("SLURM_JOB_NODELIST", ""))
    if not nodelist:
        raise UsageError("no --nodelist is given, and SLURM_JOB_NODELIST is not set; run this in a job of Slurm")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*", nodelist):
        raise UsageError(f"--nodelist {nodelist!r} is not usable; expected names as Slurm lists them, e.g. gpu[01-04]")
    slots = (flags.count("slots", 1),) if flags.all("slots") else slots_of_nodes(environ)
    return remote_source(Slurm(nodelist, slots, environ), flags)
