"""Why a job has the slots that it has, as a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.planning.values import JobAsk


def why_share(ask: JobAsk, slots: int, useful: int, givers: Sequence[str], rank: int, ranked: int) -> str:
    """The reason of a share.

    >>> why_share(JobAsk("a", most=16), slots=8, useful=16, givers=[], rank=2, ranked=3)
    '8 of 16: further slots are worth more to other jobs; its rest is number 2 of 3 from the shortest'
    >>> why_share(JobAsk("a", most=16), slots=8, useful=16, givers=["claim 'web'"], rank=0, ranked=0)
    "8 of 16: it gives slots to claim 'web'"
    >>> why_share(JobAsk("a", most=16), slots=8, useful=8, givers=[], rank=0, ranked=0)
    '8 of 16: it is not faster with more'

    Args:
        ask: The job.
        slots: Slots that it gets.
        useful: Slots beyond which it makes no more of them.
        givers: What takes slots of it.
        rank: Place of its rest, from the shortest; 0 if it is not known.
        ranked: Number of jobs whose rest is known.
    """
    many = f"{slots} of {ask.most}"
    if givers:
        return f"{many}: it gives slots to {', '.join(givers)}"
    if slots >= ask.most:
        return f"{many}: all that it asks for"
    if slots >= useful:
        return f"{many}: it is not faster with more"
    place = f"; its rest is number {rank} of {ranked} from the shortest" if rank else ""
    if slots <= ask.least:
        return f"{many}: its minimum; further slots are worth more to other jobs{place}"
    return f"{many}: further slots are worth more to other jobs{place}"
