"""The interface of all sources of hosts, and the value that they answer with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.hosts import HostSlots


@dataclass(frozen=True)
class HostDetails:
    """Details of a host besides its name and slots, for ``edl-hvd discover`` and ``prefer``.

    Attributes:
        kind: Cloud's name of the machine type, e.g. "p3.2xlarge"; empty if unknown.
        zone: Cloud's name of the zone; empty if unknown.
        price_usd_per_h: Price of an hour, or ``None``.
        since_s: Time since which it is present, in seconds since the epoch, or ``None``.
    """

    kind: str = ""
    zone: str = ""
    price_usd_per_h: float | None = None
    since_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """Answer of a source to one request.

    Attributes:
        hosts: Present hosts, each once, in any order. An empty answer states that there are none; a source that does
            not know raises.
        notices: Hosts with a preemption notice, and the seconds until each will be gone.
        details: Details of hosts.
        left_out: Members of the group that are no hosts now, by the source's name for them, with the reason.
        age_s: Seconds by which the oldest part is older than the request; 0 if every part is new.
        warning: Reason why a part is old; empty if none is.
        holds_s: Seconds for which the answer stays the same while the ``files`` of its source are unchanged.
    """

    hosts: tuple[HostSlots, ...] = ()
    notices: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, HostDetails] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    age_s: float = 0.0
    warning: str = ""
    holds_s: float = field(default=0.0, compare=False)

    def later(self, passed_s: float) -> Answer:
        """Return the same answer after a time, with less time in its notices.

        >>> Answer(notices={"a": 30.0, "b": 5.0}).later(10.0).notices
        {'a': 20.0, 'b': 0.0}
        """
        return replace(self, notices={host: max(0.0, left_s - passed_s) for host, left_s in self.notices.items()})


@dataclass(frozen=True)
class Permission:
    """A permission that a source needs, and whether it has it.

    Attributes:
        name: Platform's name of it, e.g. "list pods in namespace training".
        granted: Whether it is granted; ``None`` if that could not be found out.
        words: Answer of the platform, or how to grant it.
    """

    name: str
    granted: bool | None
    words: str


class Source(ABC):
    """A source of hosts. A subclass has to define ``answer`` alone.

    Attributes:
        parts: Sources of a combination. The answer of a combination depends on its earlier answers, so a process that
            asks it once takes its memory from a file.
    """

    parts: tuple[Source, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The paths on which the answer depends besides the time, present or not; empty for a source of another kind.

        A poll of a script asks again only when one of them has changed or the answer's ``holds_s`` are over.
        """
        return ()

    @abstractmethod
    def answer(self) -> Answer:
        """The present hosts. May block; the caller bounds the time, and calls from one thread at a time.

        Raises:
            DiscoveryError: The source does not answer, or its answer cannot be trusted.
        """

    def permissions(self) -> Iterable[Permission]:
        """Try each permission that the source needs, in order. Blocks; does not raise for a missing one."""
        for part in self.parts:
            yield from part.permissions()

    def memory(self, now_s: float) -> object:
        """The memory of earlier answers as plain JSON; times in it count back from ``now_s`` (monotonic)."""
        return None

    def recall(self, memory: object, now_s: float) -> None:  # noqa: B027 (most have no memory)
        """Load what ``memory`` returned for ``now_s``; what cannot be read is ignored."""

    def close(self) -> None:
        """Stop what runs, from any thread; does not block. No request follows."""
        for part in self.parts:
            part.close()
