"""The one interface of everything that knows hosts, and the one value that it answers with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.hosts import HostSlots


@dataclass(frozen=True)
class HostDetails:
    """What a source knows of a host besides its name and slots; only people and ``prefer`` want to know it.

    Attributes:
        kind: As the cloud calls its type of machine, e.g. "p3.2xlarge"; empty when not known.
        zone: As the cloud calls where it stands; empty when not known.
        price_usd_per_h: What it costs, or ``None``.
        since_s: Since when it is there, in seconds since the epoch, or ``None``.
    """

    kind: str = ""
    zone: str = ""
    price_usd_per_h: float | None = None
    since_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """What a source says to one question.

    Attributes:
        hosts: Every host there is, each once, in any order. None says that there are none, which is more than "I do
            not know".
        notices: Hosts that will be gone, as clouds announce it for spot instances, and in how many seconds.
        details: What else is known of hosts.
        left_out: Why what belongs to the group is no host now, by the source's name for it.
        age_s: How much older than the question the oldest part is; 0: no part stands in for a newer one.
        warning: Why a part is old; empty when none is.
    """

    hosts: tuple[HostSlots, ...] = ()
    notices: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, HostDetails] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    age_s: float = 0.0
    warning: str = ""

    def later(self, passed_s: float) -> Answer:
        """The same answer after a time, when its notices are nearer.

        >>> Answer(notices={"a": 30.0, "b": 5.0}).later(10.0).notices
        {'a': 20.0, 'b': 0.0}
        """
        return replace(self, notices={host: max(0.0, left_s - passed_s) for host, left_s in self.notices.items()})


@dataclass(frozen=True)
class Permission:
    """Something that a source has to be allowed, and whether it is.

    Attributes:
        name: As the platform calls it, e.g. "list pods in namespace training".
        granted: Whether it is; ``None`` when that could not be found out.
        words: What was answered, or how to grant it.
    """

    name: str
    granted: bool | None
    words: str


class Source(ABC):
    """Knows hosts. Only ``answer`` has to be written; the defaults are those of a source that has nothing else to say.

    Attributes:
        parts: The sources that a combination is made of. What a combination answers depends on its answers before, so
            a process that asks it once takes its memory from a file.
    """

    parts: tuple[Source, ...] = ()

    @abstractmethod
    def answer(self) -> Answer:
        """Every host there is now. May block; the caller bounds the time, and asks from one thread at a time.

        Raises:
            DiscoveryError: The source did not answer, or not in a way that can be trusted.
        """

    def permissions(self) -> Iterable[Permission]:
        """Each one that it needs, tried now, the first ones first. Blocks; never raises for one that is missing."""
        for part in self.parts:
            yield from part.permissions()

    def memory(self, now_s: float) -> object:
        """What it has to know again, as plain JSON; times in it count back from ``now_s`` (monotonic)."""
        return None

    def recall(self, memory: object, now_s: float) -> None:  # noqa: B027 (most have no memory)
        """Take over what ``memory`` gave, which counted from ``now_s``. What cannot be read is forgotten."""

    def close(self) -> None:
        """End what runs, from any thread; does not block. The source is asked no more."""
        for part in self.parts:
            part.close()
