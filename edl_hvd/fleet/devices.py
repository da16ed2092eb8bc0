"""Which GPUs of its hosts each job and each claim of a fleet has, so that two on one host never share one. Pure.

A slot of a host is one GPU. A job keeps the number of a slot for as long as it has that slot: when it grows, numbers
that nobody has follow its own; when it shrinks, the last ones go, as its workers on the highest slots do. A number is
free again when the worker that has it has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count
from typing import TypeVar

from edl_hvd.fleet.state import Fleet, FleetJob, HeldClaim, as_counts, used
from edl_hvd.hosts import HostSlots

Holder = TypeVar("Holder", FleetJob, HeldClaim)


def numbered(fleet: Fleet) -> Fleet:
    """The fleet with a device for each slot that is given, granted or occupied.

    >>> from edl_hvd.fleet.state import JobSpec
    >>> alone = FleetJob(JobSpec("one", ("train",), "/", 1, 2), 0.0, given=(HostSlots("a", 2),))
    >>> fleet = numbered(Fleet(hosts=(HostSlots("a", 4, (0, 1, 6, 7)),), jobs={"one": alone}))
    >>> fleet.jobs["one"].listed[0].devices
    (0, 1)
    """
    there = {entry.host: entry.devices or tuple(range(entry.slots)) for entry in fleet.hosts}
    jobs = [job for job in fleet.jobs.values() if job.given or job.occupied or job.devices]
    slots = [used(job) for job in jobs] + [as_counts(one.granted) for one in fleet.claims.values()]
    had = [job.devices for job in jobs] + [one.devices for one in fleet.claims.values()]
    kept = [
        {entry.host: entry.devices[: counts.get(entry.host, 0)] for entry in devices}
        for devices, counts in zip(had, slots, strict=True)
    ]
    taken: defaultdict[str, set[int]] = defaultdict(set)
    for numbers in kept:
        for host, devices in numbers.items():
            taken[host].update(devices)
    dealt = iter([_dealt(numbers, counts, there, taken) for numbers, counts in zip(kept, slots, strict=True)])
    return replace(
        fleet,
        jobs={**fleet.jobs, **{job.name: _having(job, next(dealt)) for job in jobs}},
        claims={name: _having(one, next(dealt)) for name, one in fleet.claims.items()},
    )


def _dealt(
    kept: Mapping[str, tuple[int, ...]], counts: Mapping[str, int], there: Mapping[str, tuple[int, ...]],
    taken: defaultdict[str, set[int]],
) -> tuple[HostSlots, ...]:  # fmt: skip
    """The numbers that a holder keeps, and after them new ones for as many slots as it has more."""
    found = []
    for host, slots in sorted(counts.items()):
        devices = list(kept.get(host, ()))
        # A host that lists fewer slots than are still used on it has no more numbers of its own.
        for number in chain(there.get(host, ()), count(max(there.get(host, ()), default=-1) + 1)):
            if len(devices) == slots:
                break
            if number not in taken[host]:
                taken[host].add(number)
                devices.append(number)
        if slots:
            found.append(HostSlots(host, slots, tuple(devices)))
    return tuple(found)


def _having(holder: Holder, devices: tuple[HostSlots, ...]) -> Holder:
    return holder if holder.devices == devices else replace(holder, devices=devices)
