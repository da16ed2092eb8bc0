"""A source to ask, and how long its answers count."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.source import Source

REMOTE_FLAGS = ("refresh", "stale", "first")


@dataclass(frozen=True)
class Question:
    """A source to ask, and how long its answers count.

    Attributes:
        refresh_s: Shortest time between two questions; 0 asks at every poll.
        stale_s: How long after a question its answer may stand in for a newer one.
        first_s: How long a poll may wait when nobody has asked for a while: Horovod ends a job whose
            first poll fails, and nothing trains yet.
        needs_packages: The source imports installed packages, which a poll itself runs without.
        is_damped: Hosts that come and go again and again are left out for a while, see ``damping.py``.
    """

    source: Source
    refresh_s: float
    stale_s: float
    first_s: float
    needs_packages: bool = False
    is_damped: bool = False


def ask_locally(source: Source, flags: Flags) -> Question:
    """Of a source that is asked at every poll, because that costs next to nothing; it has the flag ``--stale``."""
    # A file that does not read now is a mistake to show, not an outage to bridge: nothing stands in
    # for it unless asked. Horovod keeps its hosts while a script fails. Nor is it damped: who writes hosts
    # into a file means it.
    return Question(source, refresh_s=0, stale_s=flags.seconds("stale", 0), first_s=0)


def ask_remotely(source: Source, flags: Flags, needs_packages: bool = False) -> Question:
    """Of a source behind a network, with the ``REMOTE_FLAGS``."""
    refresh_s = flags.seconds("refresh", 10)
    # New hosts take a minute or more to boot; ten seconds are lost in that, and a tenth of the polls ask.
    stale_s = flags.seconds("stale", 300)
    # Longer than a throttled account or a renewed token takes, shorter than a person's patience.
    first_s = flags.seconds("first", 20)
    # Loading boto3, a token and two calls take about 2 s; this is ten times that.
    return Question(source, refresh_s, stale_s, first_s, needs_packages, is_damped=True)
