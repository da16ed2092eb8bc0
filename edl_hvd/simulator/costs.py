"""How long things take. All assume a state of 1 GB, and come from ``docs/benchmarks.md`` where it has them."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields

from edl_hvd.errors import UsageError


def _cost(default_s: float, flag: str, meaning: str, source: str) -> float:
    """A field; ``source`` says where its default comes from."""
    made: float = field(default=default_s, metadata={"flag": flag, "meaning": meaning, "source": source})
    return made


@dataclass(frozen=True)
class Costs:
    """Seconds each. ``metadata`` of a field has its flag, its meaning and the source of its default.

    Raises:
        UsageError: One of them is negative or no number, or the step is no longer than nothing.
    """

    start_s: float = _cost(
        2.2, "--start-time", "From a worker's process to its readiness: imports, model, data.",
        "Side by side, 'a host is added, 2 -> 4 workers': under horovodrun everybody waits for a start, 2.22 s",
    )  # fmt: skip
    step_s: float = _cost(
        0.1, "--step-time", "A training step; what was done of it is lost when its world breaks.",
        "Hosts join: 'a step of the toy training, 0.1 s'",
    )  # fmt: skip
    restore_s: float = _cost(
        5.0, "--restore-cost", "Reading a checkpoint, while all wait.",
        "Two ranks, one checkpoint, down: 180 and 224 MB/s",
    )  # fmt: skip
    resize_s: float = _cost(
        0.3, "--resize-cost", "This project: training stands still for an agreed change of the world.",
        "Hosts join, 1 GB: 0.28 s",
    )  # fmt: skip
    recover_s: float = _cost(
        0.2, "--recover-cost", "This project: the same, for a worker that dies.",
        "A worker is killed: 0.19 s",
    )  # fmt: skip
    follow_s: float = _cost(
        1.0, "--follow-time", "This project: a newcomer takes the state over while the others train.",
        "not measured over a network: 1 GB at 10 Gbit/s",
    )  # fmt: skip
    copy_s: float = _cost(
        0.18, "--copy-cost", "This project: training stands still while a checkpoint is copied.",
        "Commits and checkpoints, 1 GB, 'edl_hvd checkpoint begins': 182 ms",
    )  # fmt: skip
    write_s: float = _cost(
        3.5, "--write-time", "This project: until such a copy is in storage, while training goes on.",
        "Two ranks, one checkpoint, up: 283 MB/s",
    )  # fmt: skip
    checkpoint_s: float = _cost(
        1.1, "--checkpoint-cost", "The others: training stands still while a checkpoint is written.",
        "Commits and checkpoints, 1 GB, 'torch.save': 1108 ms, to memory",
    )  # fmt: skip
    gloo_timeout_s: float = _cost(
        30.0, "--gloo-timeout", "Stock Horovod: survivors of a world of three or more wait for it when a host is lost.",
        "A worker is killed: 30.2 s",
    )  # fmt: skip
    reset_s: float = _cost(
        0.1, "--reset-cost", "Stock Horovod: the rest of a change of the world.",
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
