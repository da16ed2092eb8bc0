"""How long things take. The defaults are for a state of 1 GB; ``docs/simulate.md`` says where they are from."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields

from edl_hvd.errors import UsageError


def _cost(default_s: float, flag: str, meaning: str, source: str) -> float:
    """A field of ``Costs``; ``source`` names the origin of its default."""
    made: float = field(default=default_s, metadata={"flag": flag, "meaning": meaning, "source": source})
    return made


@dataclass(frozen=True)
class Costs:
    """Seconds that each thing takes. ``metadata`` of a field has its flag, its meaning and the source of its default.

    Raises:
        UsageError: A value is negative or not a number, or the time of a step is 0.
    """

    start_s: float = _cost(
        2.2, "--start-time", "Start of a worker until it is ready: imports, model, data.",
        "Side by side, 'a host is added, 2 -> 4 workers': under horovodrun all workers wait for a start, 2.22 s",
    )  # fmt: skip
    step_s: float = _cost(
        0.1, "--step-time", "A training step, which is lost when its world breaks.",
        "Hosts join, 1 to 2 workers: 'a step before', 0.10 s",
    )  # fmt: skip
    restore_s: float = _cost(
        1.6, "--restore-cost", "Reading a checkpoint while all workers wait.",
        "Two ranks, one checkpoint, down, 80 MB/s per connection, the newest run: 642 MB/s",
    )  # fmt: skip
    resize_s: float = _cost(
        0.15, "--resize-cost", "edl_hvd: training pauses for an agreed resize.",
        "Hosts join, 1 to 2 workers, 1 GB, all moved by each step: 0.15 s beyond a step",
    )  # fmt: skip
    recover_s: float = _cost(
        0.2, "--recover-cost", "edl_hvd: training pauses after a worker was lost.",
        "A worker is killed, no other load: 95 % and a step, rounded up",
    )  # fmt: skip
    follow_s: float = _cost(
        1.0, "--follow-time", "edl_hvd: a newcomer receives the state while the others train.",
        "not measured over a network: 1 GB at 10 Gbit/s",
    )  # fmt: skip
    copy_s: float = _cost(
        0.14, "--copy-cost", "edl_hvd: training pauses while a checkpoint is copied.",
        "Commits and checkpoints, 1 GB, checkpoint begins, and 'a step that comes at once': 142 ms",
    )  # fmt: skip
    write_s: float = _cost(
        3.5, "--write-time", "edl_hvd: writing the copy to storage while training goes on.",
        "Two ranks, one checkpoint, up, in an earlier version; docs/simulate.md has the present times",
    )  # fmt: skip
    checkpoint_s: float = _cost(
        1.0, "--checkpoint-cost", "The other systems: training pauses while a checkpoint is written.",
        "Commits and checkpoints, 1 GB, 'torch.save': 1023 ms, to memory",
    )  # fmt: skip
    gloo_timeout_s: float = _cost(
        30.0, "--gloo-timeout", "Stock Horovod: survivors of a world of 3 or more wait after a lost host.",
        "A worker is killed, stock Horovod: 30.2 s",
    )  # fmt: skip
    reset_s: float = _cost(
        0.1, "--reset-cost", "Stock Horovod: the rest of a resize.",
        "Side by side, 'one of 3 dies, another as the rest meet': 0.09 s",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0 <= value < math.inf or (entry.name == "step_s" and not value):
                least = "more than 0" if entry.name == "step_s" else "at least 0"
                raise UsageError(f"{flag_of(entry)} is {value} s; expected a time, {least}")


def flag_of(entry: Field[object]) -> str:
    """The flag of a field of ``Costs``."""
    return str(entry.metadata["flag"])
