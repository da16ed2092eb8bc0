"""Whether the workers of a world wait for each other in different collectives, which never ends, and how to say so.

A collective begins once every worker has started it. So the number of times that each worker has started each of those
that are waited for tells a deadlock from a slow network, in which the names may differ, too: the one that a worker
still waits for may be complete on the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_NAMED = 8
# Of the ranks that wait at one place; a line for a thousand of them would hide the other place.
_OPERATION = re.compile(r"edl_hvd\.(sum|max|min)\.(\(.*\))")
_GRADIENT = re.compile(r"edl_hvd\.gradient\.(.*)")
_REMEDY = (
    "every worker has to make the same collective calls in the same order, with the same operation and shape: not "
    "under `if edl_hvd.rank() == 0`, not in a branch that some workers take, and not in the loop over micro-batches, "
    "of which workers compute different numbers; correct the script, then start the job again"
)


@dataclass(frozen=True)
class Waiting:
    """Where a worker waits.

    Attributes:
        rank: Of the worker.
        worker: As ``host:slot``.
        collective: The name of the one that it waits for.
        started: How often it has started each of those that anyone waits for, by name.
        place: Line and function of the script; empty if nobody knows.
    """

    rank: int
    worker: str
    collective: str
    started: Mapping[str, int]
    place: str = ""


def is_deadlock(workers: Sequence[Waiting]) -> bool:
    """Whether each of the workers waits for a collective that another one has not started.

    As soon as one waits for a collective that all have started, that may still end, and the worker go on.
    """
    return bool(workers) and all(
        any(other.started.get(one.collective, 0) < one.started.get(one.collective, 0) for other in workers)
        for one in workers
    )


def describe_deadlock(workers: Sequence[Waiting], seconds: float) -> str:
    """The description of a deadlock that has lasted for ``seconds``, for the user. One line."""
    return (
        f"the workers wait for each other in different collectives, for {seconds:.0f} s by now "
        f"(EDL_HVD_COLLECTIVE_TIMEOUT): {'; '.join(_places(workers))}; {_REMEDY}"
    )


def describe_standstill(workers: Sequence[Waiting], seconds: float, step: int) -> str:
    """The same when they wait for what all of them have started."""
    return (
        f"all {len(workers)} workers have waited {seconds:.0f} s at step {step} for a collective that all of them have "
        f"started: {'; '.join(_places(workers))}; check the network between their hosts, and whether a host stalls"
    )


def _places(workers: Sequence[Waiting]) -> list[str]:
    """Who waits where, workers at the same place together."""
    together: dict[tuple[str, str], list[Waiting]] = {}
    for one in sorted(workers, key=lambda one: one.rank):
        together.setdefault((one.collective, one.place), []).append(one)
    return [f"{_who(group)} in {_call(name)}{f' at {place}' if place else ''}" for (name, place), group in
            together.items()]  # fmt: skip


def _who(group: Sequence[Waiting]) -> str:
    named = ", ".join(f"{one.rank} ({one.worker})" for one in group[:_MOST_NAMED])
    more = f" and {len(group) - _MOST_NAMED} more" if len(group) > _MOST_NAMED else ""
    return f"rank{'s' * (len(group) > 1)} {named}{more}"


def _call(name: str) -> str:
    """
    >>> _call("edl_hvd.sum.(1,)"), _call("edl_hvd.gradient.0.weight"), _call("mine")
    ("allreduce 'sum' of shape (1,)", "the sum of gradients, that of '0.weight'", "'mine'")
    """
    if operation := _OPERATION.fullmatch(name):
        return f"allreduce {operation[1]!r} of shape {operation[2]}"
    if gradient := _GRADIENT.fullmatch(name):
        return f"the sum of gradients, that of {gradient[1]!r}"
    return "the sum of gradients" if name == "edl_hvd.flags" else repr(name)
