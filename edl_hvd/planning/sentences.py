"""Why a job has the slots that it has, as a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.planning.values import JobAsk
from edl_hvd.values import count


@dataclass(frozen=True)
class KindChange:
    """The kinds of hosts that a job comes from and moves to."""

    source: str
    to: str


@dataclass(frozen=True)
class Growth:
    """What a job that has fewer slots than it can use would need to get more.

    Attributes:
        slots: Slots that it would get at once.
        free: Slots that nothing has, on hosts of its kind.
        others_have: Whether other jobs there have slots above their minimum.
        limit: Most slots of its queue, if that is what is in the way; else ``None``.
    """

    slots: int = 1
    free: int = 0
    others_have: bool = True
    limit: int | None = None


def why_share(
    ask: JobAsk, slots: int, useful: int, givers: Sequence[str], rank: int, ranked: int, growth: Growth,
    moves: KindChange | None = None,
) -> str:  # fmt: skip
    """The reason of a share.

    >>> why_share(JobAsk("a", most=16), slots=8, useful=16, givers=[], rank=2, ranked=3, growth=Growth())
    '8 of 16: further slots are worth more to other jobs; its rest is number 2 of 3 from the shortest'
    >>> why_share(JobAsk("a", most=16), slots=8, useful=16, givers=["claim 'web'"], rank=0, ranked=0, growth=Growth())
    "8 of 16: it gives slots to claim 'web'"
    >>> why_share(JobAsk("a", most=16), slots=8, useful=8, givers=[], rank=0, ranked=0, growth=Growth())
    '8 of 16: it is not faster with more'
    >>> why_share(JobAsk("a", most=16), 1, 16, [], rank=0, ranked=0, growth=Growth(others_have=False))
    '1 of 16: its minimum; no further slot is free'
    >>> why_share(JobAsk("a", "vision", most=16), 8, 16, [], rank=0, ranked=0, growth=Growth(free=4, limit=8))
    "8 of 16: the jobs of queue 'vision' together may have 8"
    >>> why_share(JobAsk("a", most=4), 4, 4, [], rank=0, ranked=0, growth=Growth(), moves=KindChange("t4", "a100"))
    '4 of 4, moved from t4 to a100: all that it asks for'

    Args:
        ask: The job.
        slots: Slots that it gets.
        useful: Slots beyond which it makes no more of them.
        givers: What takes slots of it.
        rank: Place of its rest, from the shortest; 0 if it is not known.
        ranked: Number of jobs whose rest is known.
        growth: What more slots would need; without effect where it has all that it can use.
        moves: Whether it moves to another kind of hosts.
    """
    many = f"{slots} of {ask.most}"
    if moves is not None:
        many += f", moved from {moves.source or 'hosts without a kind'} to {moves.to or 'hosts without a kind'}"
    if givers:
        return f"{many}: it gives slots to {', '.join(givers)}"
    if slots >= ask.most:
        return f"{many}: all that it asks for"
    if slots >= useful:
        return f"{many}: it is not faster with more"
    least = "its minimum; " if slots <= ask.least else ""
    return f"{many}: {least}{_why_no_more(ask, rank, ranked, growth)}"


def _why_no_more(ask: JobAsk, rank: int, ranked: int, growth: Growth) -> str:
    if growth.limit is not None:
        return f"the jobs of queue {ask.queue!r} together may have {growth.limit}"
    if growth.free >= growth.slots:
        return "further slots are not worth a change now"
    if growth.others_have:
        place = f"; its rest is number {rank} of {ranked} from the shortest" if rank else ""
        return f"further slots are worth more to other jobs{place}"
    return (
        f"it would grow by {count(growth.slots, 'slot')}, and {growth.free} {'is' if growth.free == 1 else 'are'} free"
        if growth.free
        else ("no further slot is free")
    )
