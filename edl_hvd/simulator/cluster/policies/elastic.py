"""What policies of elastic jobs share: a job's goodput over GPUs, and putting numbers on hosts."""

from __future__ import annotations

from edl_hvd.hosts import HostSlots
from edl_hvd.planning.places import Placer
from edl_hvd.planning.rooms import HostTable, Ledger
from edl_hvd.planning.values import Curve, JobAsk, Room
from edl_hvd.simulator.cluster.view import Allocation, ClusterView, ViewedJob


def reach(job: ViewedJob, view: ClusterView) -> int:
    """Most GPUs that a job may have now."""
    return min(view.shapes[job.name].most, view.slots, job.explored)


def gpu_numbers(most: int, host_slots: int) -> list[int]:
    """Numbers of GPUs that are worth looking at: powers of two on one host, then whole hosts.

    >>> gpu_numbers(14, host_slots=4)
    [1, 2, 4, 8, 12]
    """
    on_one = [1 << power for power in range(host_slots.bit_length()) if 1 << power < host_slots]
    return [size for size in [*on_one, *range(host_slots, most + 1, host_slots)] if size <= most]


def goodput_curve(job: ViewedJob, view: ClusterView) -> Curve:
    """A job's goodput up to its reach, by what it has measured; in proportion to GPUs before it has."""
    sizes = gpu_numbers(reach(job, view), view.host_slots)
    known = job.curve(sizes, view.host_slots)
    return Curve(tuple(sizes), tuple(float(size) for size in sizes)) if known is None else known


def put(numbers: dict[str, int], view: ClusterView) -> dict[str, Allocation]:
    """Hosts for these numbers of GPUs, as near to them as there is room, by the planner's own placing."""
    hosts = HostTable([Room(f"h{number:03d}", view.host_slots) for number in range(view.hosts)])
    names = [job.name for job in view.jobs]
    ledger = Ledger(hosts, len(names))
    for number, name in enumerate(names):
        for host, slots in view.holds.get(name, {}).items():
            ledger.take(number, host, slots)
    asks = [JobAsk(name, most=view.slots) for name in names]
    for number, name in enumerate(names):
        if not numbers.get(name) and ledger.held[number]:
            ledger.release_all(number)
    placer = Placer(ledger, asks, may_span_together=False, may_move=lambda job: True)
    sizes = gpu_numbers(view.slots, view.host_slots)
    wanted = {number: numbers[name] for number, name in enumerate(names) if numbers.get(name)}
    placer.place(wanted, lambda job: sizes)
    return {name: dict(ledger.by_job[number]) for number, name in enumerate(names) if ledger.held[number]}


def as_holds(allocation: Allocation) -> tuple[HostSlots, ...]:
    """An allocation as the planner reads it."""
    return tuple(HostSlots(f"h{host:03d}", slots) for host, slots in allocation.items())
