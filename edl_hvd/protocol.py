"""The messages of a driver and its workers: one frozen value for each thing that one side says to the other.

A worker keeps a connection to its driver, as long as it lives. A message is one line, a JSON object: its class in
lower case as ``what``, and its fields by their names. Every field is there, no other is, and each has its type; a
message that is not so ends the connection. Driver and workers of a job are of the same version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar, get_args

from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.json_values import formerly, read_fields, show
from edl_hvd.teacher_counts import TeacherCounts
from edl_hvd.work_report import WorkReport

ENDS_IN_ORDER = b"\n"
# All that is said after a WatchHello, if anything; the mended Horovod says it, too.
LONGEST_SAVE_S = 600.0
# A last checkpoint of some gigabytes over a slow network. Workers whose driver is gone end after this time, whether it
# is written or not, and the next driver does not wait for longer.
SAME_SIGTERM_S = 1.0
# GNU timeout and some schedulers send SIGTERM to a process and then to its group, so that one request arrives twice.


class Message:
    """Base of all messages. Each is a frozen dataclass of plain fields."""


MessageT = TypeVar("MessageT", bound=Message)
Vocabulary: TypeAlias = Mapping[str, type[MessageT]]
"""The messages that one side may send, by the word that each has for ``what``."""
WorkerPhase: TypeAlias = Literal[
    "start", "join", "script", "input", "compute", "collective", "commit", "checkpoint", "end",
    "teachers", "validation", "compile",
    "silence",
]  # fmt: skip
"""What a worker is doing: the phases that it enters, those that it recognises from outside
(:mod:`edl_hvd.worker.progress`), and the one that its driver sees where nothing comes."""

# --- from a worker to its driver ---


@dataclass(frozen=True)
class Hello(Message):
    """The first message of a connection. With another token, or from an unknown worker, it ends the connection.

    Attributes:
        token: Secret of the job. It travels in the worker's environment, never on a command line.
        worker: Name of the worker, as ``host:slot``.
        incarnation: Which process of its slot it is.
    """

    token: str = field(repr=False)
    worker: str
    incarnation: int = field(metadata=formerly("life"))


@dataclass(frozen=True)
class WatchHello(Hello):
    """The first message of a connection that ends when the process of the worker begins to end.

    Nothing is said there afterwards, but one empty line if the process ends in order.
    """


@dataclass(frozen=True)
class Ready(Message):
    """This worker is in no world and wants to be in one; ``step`` is what it holds, -1 for nothing."""

    step: int


@dataclass(frozen=True)
class CaughtUp(Message):
    """This standby has caught up with the world of this generation, or cannot."""

    generation: int


@dataclass(frozen=True)
class ServingState(Message):
    """The answer to :class:`ServeState`: where this worker sends its state to ``standby``; port 0 if it cannot."""

    generation: int
    standby: str
    address: str
    port: int


@dataclass(frozen=True)
class Formed(Message):
    """This worker has started Horovod in the world of this generation."""

    generation: int


@dataclass(frozen=True)
class Beat(Message):
    """What a worker does, said several times a second.

    Attributes:
        generation: Generation of its world; 0 before the first.
        pid: Process number, on its host.
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint that it knows to be complete; -1 for none.
        phase: What it is doing.
        phase_s: How long it has been doing that.
        compute_s: Seconds that it has spent in phase "compute" since it was started.
        waits: Calls that end only when every member has made them, and that it has come through in this world.
        steps: Optimizer steps that its process took part in.
        batches: Micro-batches that it has begun to compute since it was started.
        slowest_s: Its longest recent phase "compute", "input" or "commit".
        collective: Name of the collective that it waits for; empty if it waits for none, or nobody knows.
        teachers: What it gets from teachers; ``None`` if it has none.
        restored_step: Step of the checkpoint that it has restored; -1 for none.
        work: How the job divides its batch, and what is left; ``None`` where nobody knows.
    """

    generation: int
    pid: int
    step: int
    samples: int
    saved_step: int
    phase: WorkerPhase
    phase_s: float
    compute_s: float
    waits: int
    steps: int
    batches: int
    slowest_s: float
    collective: str = ""
    teachers: TeacherCounts | None = None
    restored_step: int = -1
    work: WorkReport | None = None


@dataclass(frozen=True)
class Raised(Message):
    """The script of this worker ended in an error of its own; its process is about to end.

    ``hopeless`` if the script is wrong, and this was found before the first step of this process; ``ends_job`` if
    another try would come to the same, whatever the others do.
    """

    step: int
    error: str
    hopeless: bool
    ends_job: bool = False


@dataclass(frozen=True)
class Done(Message):
    """The training function of this worker returned."""


@dataclass(frozen=True)
class Drain(Message):
    """This worker was told by SIGTERM to leave its world at the next commit."""


@dataclass(frozen=True)
class PreemptionNotice(Message):
    """The host of this worker will be gone in ``left_s`` seconds."""

    left_s: float


@dataclass(frozen=True)
class Waits(Message):
    """The answer to :class:`Explain`: what this worker waits for, and where.

    Attributes:
        generation: Generation of its world.
        waits: As in :class:`Beat`.
        collective: As in :class:`Beat`.
        started: How often it has started each of the collectives that it was asked about.
        place: Line and function of the script; empty if nobody knows.
        stack: Stack of the thread that waits, for people.
    """

    generation: int
    waits: int
    collective: str
    started: tuple[int, ...]
    place: str
    stack: str


FromWorker: TypeAlias = (
    Ready | CaughtUp | ServingState | Formed | Beat | Raised | Done | Drain | PreemptionNotice | Waits
)
"""What a worker says after its hello."""

# --- from the driver to a worker ---


@dataclass(frozen=True)
class WorldAssigned(Message):
    """This worker is a member of this world.

    Attributes:
        generation: Generation of the world.
        members: All of its workers; the rank of each is its place here.
        store_address: Where this worker reaches the key-value store of the world.
        store_port: Port of that store.
        interface: Network interface that every host has; ``None``: the one with the address of this worker.
        address: Address at which the other members reach this worker; ``None``: the one of this connection.
        known_step: The furthest step that the driver has heard of.
    """

    generation: int
    members: tuple[str, ...]
    store_address: str
    store_port: int
    interface: str | None
    address: str | None
    known_step: int


@dataclass(frozen=True)
class ResizeRequested(Message):
    """The members of the world of this generation are to leave it at their next commit."""

    generation: int


@dataclass(frozen=True)
class PeerLost(Message):
    """A member of the world of this generation is dead."""

    generation: int
    worker: str


@dataclass(frozen=True)
class StragglerFound(Message):
    """A worker computes more slowly than the others; rank 0 writes it down.

    Attributes:
        worker: Name of the straggler.
        generation: Generation of the world.
        step: Optimizer steps of the whole run.
        compute_s: Its mean time for a micro-batch, over the last window.
        median_s: The median of all members. Of an even number the lower one, so that one of two can be slow.
    """

    worker: str
    generation: int
    step: int
    compute_s: float
    median_s: float


@dataclass(frozen=True)
class ShutDown(Message):
    """This worker is to end with exit code 0; ``save`` the state to a checkpoint before, if ``left_s`` allows it.

    ``left_s`` is ``None`` where nobody knows how long its host stays.
    """

    save: bool
    left_s: float | None


@dataclass(frozen=True)
class ServeState(Message):
    """This member is to send its state to a new worker, ``standby``, which reaches it at ``address``.

    ``address`` is ``None`` for the one of this connection.
    """

    generation: int
    standby: str
    address: str | None


@dataclass(frozen=True)
class ReceiveState(Message):
    """This new worker is to receive the state of the member that listens there; port 0: there is none."""

    generation: int
    address: str
    port: int


@dataclass(frozen=True)
class DonorLost(Message):
    """The member that sends its state to this new worker is dead: nothing more will come."""


@dataclass(frozen=True)
class Explain(Message):
    """All members of this world wait: how often has this worker started each of these collectives?"""

    generation: int
    collectives: tuple[str, ...]


ToWorker: TypeAlias = (
    WorldAssigned
    | ResizeRequested
    | PeerLost
    | StragglerFound
    | ShutDown
    | ServeState
    | ReceiveState
    | DonorLost
    | Explain
)

# --- as lines ---


def vocabulary(*kinds: type[MessageT]) -> Vocabulary[MessageT]:
    """These messages by their words."""
    return {_word(kind): kind for kind in kinds}


def encode(message: Message) -> bytes:
    """One line with its end."""
    return json.dumps({"what": _word(type(message)), **vars(message)}, default=vars).encode() + b"\n"


def decode(line: bytes, known: Vocabulary[MessageT]) -> MessageT:
    """The message that a line holds.

    Raises:
        ProtocolError: It holds none of the known ones, or one of the wrong shape.
    """
    try:
        return _read(json.loads(line), known)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"cannot read a line of {len(line)} bytes as a message: {error}") from error


def _read(fields: object, known: Vocabulary[MessageT]) -> MessageT:
    what = fields.pop("what", None) if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(what, str) or what not in known:
        raise UsageError(f"its 'what' is {show(what)}; expected an object with one of {', '.join(known)}")
    message = read_fields(known[what], fields)
    if len(vars(message)) != len(fields):
        raise UsageError(f"{what} has only {', '.join(fields)}; expected {', '.join(vars(message))}")
    return message


def _word(kind: type[Message]) -> str:
    return kind.__name__.lower()


HELLO: Vocabulary[Hello] = vocabulary(Hello, WatchHello)
FROM_WORKER: Vocabulary[FromWorker] = vocabulary(*get_args(FromWorker))
TO_WORKER: Vocabulary[ToWorker] = vocabulary(*get_args(ToWorker))
