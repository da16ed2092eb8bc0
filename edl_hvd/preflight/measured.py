"""What a host says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.protocol import Message


@dataclass(frozen=True)
class Measured(Message):
    """One host, looked at by itself.

    Attributes:
        device: Where workers would train: "cuda" or "cpu".
        count: Devices of that kind; 1 for "cpu", however many cores it has.
        gflop_s: A matrix product in float32 on the slowest of them, in 10^9 operations per second; 0 if there is none.
        fault: What is wrong whatever other hosts can do; empty: nothing.
    """

    device: str
    count: int
    gflop_s: float
    fault: str = ""


@dataclass(frozen=True)
class HostFindings:
    """All that is known of a host.

    Attributes:
        host: Its name.
        slots: Workers that it may run.
        measured: ``None`` if it did not answer.
        exchange_s: Its fastest allreduce with another host, in seconds; ``None`` if there was none.
        problem: Why there is no answer, or no allreduce; empty: there was no need.
    """

    host: str
    slots: int
    measured: Measured | None = None
    exchange_s: float | None = None
    problem: str = ""
