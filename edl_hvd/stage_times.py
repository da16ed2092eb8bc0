"""Where the time of a micro-batch goes that teachers answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Where the time of a micro-batch goes from reading to learning: mean seconds since the pass over the data began.

    Attributes:
        read_s: In the loader itself.
        queued_s: It is read, and no teacher has asked for it yet.
        wire_s: To the teacher and back.
        waiting_s: It waits at the teacher for those before it.
        compute_s: In the model, with the others of its batch.
        ready_s: Its answer is there, and the training is not so far yet.
        decode_s: The answer becomes tensors, in the training's own time.
    """

    read_s: float = 0.0
    queued_s: float = 0.0
    wire_s: float = 0.0
    waiting_s: float = 0.0
    compute_s: float = 0.0
    ready_s: float = 0.0
    decode_s: float = 0.0


def mean_stages(stages: list[StageTimes]) -> StageTimes | None:
    """The means of times that are means themselves; ``None`` if there are none.

    >>> mean_stages([StageTimes(compute_s=0.1), StageTimes(compute_s=0.3)]).compute_s
    0.2
    """
    if not stages:
        return None
    means = {name: sum(getattr(one, name) for one in stages) / len(stages) for name in StageTimes.__dataclass_fields__}
    return StageTimes(**{name: round(mean_s, 6) for name, mean_s in means.items()})
