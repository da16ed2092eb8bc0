"""What a driver and a process that measures its host say to each other, beside ``Measured``; see ``protocol.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, get_args

from edl_hvd.json_values import formerly
from edl_hvd.preflight.measured import Measured
from edl_hvd.protocol import Message, Vocabulary, vocabulary


@dataclass(frozen=True)
class Measure(Message):
    """Say what this host is worth; the answer is ``Measured``."""


@dataclass(frozen=True)
class Meet(Message):
    """Make a small allreduce with another host.

    Attributes:
        pair: Number of the meeting.
        own: Address at which the other host reaches this one; ``None``: the one of this connection.
        other: Address of the host that listens; ``None`` makes this one listen.
        port: Port there; ``None`` makes this one listen.
        interface: Network interface that every host has; ``None``: the one with the address ``own``.
    """

    pair: int
    own: str | None
    other: str | None
    port: int | None
    interface: str | None


@dataclass(frozen=True)
class Listening(Message):
    """The other host of the meeting ``pair`` may come to this port."""

    pair: int
    port: int


@dataclass(frozen=True)
class Met(Message):
    """How long the fastest allreduce of the meeting ``pair`` took; or its problem, for people."""

    pair: int
    duration_s: float = field(metadata=formerly("seconds"))
    problem: str = ""


FromProbe: TypeAlias = Measured | Listening | Met
ToProbe: TypeAlias = Measure | Meet

FROM_PROBE: Vocabulary[FromProbe] = vocabulary(*get_args(FromProbe))
TO_PROBE: Vocabulary[ToProbe] = vocabulary(*get_args(ToProbe))
