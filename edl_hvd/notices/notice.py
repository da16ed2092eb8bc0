"""Preemption notices, and the interface of platforms that announce them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Notice:
    """Announcement that this host will or may be gone.

    Notices about the same event are equal, also if their deadlines differ.

    Attributes:
        kind: "spot interruption", "rebalance recommendation", "preemption", "host maintenance", "scheduled reboot",
            "scheduled redeployment", "scheduled termination", "spot eviction" or "pod deletion".
        deadline_s: Seconds from the answer until the host is gone; ``None`` if the platform names no time.
        words: Sentence that describes it.
        about: Time, or the platform's name for the event, by which notices of one kind differ.
    """

    kind: str
    deadline_s: float | None = field(compare=False)
    words: str = field(compare=False)
    about: str = ""


class Provider(Protocol):
    """A platform that announces notices.

    Attributes:
        name: Name of the platform.
        every_s: Seconds between two requests.
    """

    name: str
    every_s: float

    def ask(self) -> Notice | None:
        """The most urgent notice for this host, ``None`` for none; blocks for some seconds at most.

        Raises:
            PlatformError: The platform does not answer, or its answer is not understood.
        """
