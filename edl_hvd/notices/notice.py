"""What a platform announces, and the one interface of everything that knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Notice:
    """This host will go, or may.

    Two notices are equal when they are about the same thing, however much of the time has passed.

    Attributes:
        kind: "spot interruption", "rebalance recommendation", "preemption", "host maintenance", "scheduled reboot",
            "scheduled redeployment", "scheduled termination", "spot eviction" or "pod deletion".
        deadline_s: Seconds from the answer until it goes; ``None``: nobody has said when, or whether at all.
        words: A sentence for people.
        about: What tells two notices of one kind apart: a time, or the platform's name for the event.
    """

    kind: str
    deadline_s: float | None = field(compare=False)
    words: str = field(compare=False)
    about: str = ""


class Provider(Protocol):
    """A platform that can be asked.

    Attributes:
        name: Of the platform.
        every_s: How often to ask it.
    """

    name: str
    every_s: float

    def ask(self) -> Notice | None:
        """What is announced to this host now, the most urgent first; blocks for some seconds at most.

        Raises:
            PlatformError: The platform does not answer, or not in a way that is understood.
        """
