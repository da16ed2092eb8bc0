"""Which hosts are good enough, compared with the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from edl_hvd.preflight.measured import HostFindings, Measured

BOUND = 2.0
# A world is as fast as its slowest worker: one host at half the speed costs as much as it brings to a world of two,
# and more to any larger one. Two hosts of one kind differ by less than a tenth.
QUICK_S = 0.005
# 1 Gbit/s needs 8 ms for the megabyte. Below that, differences between hosts are those of a moment, not of a network.


def judge(findings: HostFindings, others: Sequence[HostFindings], bound: float = BOUND) -> str:
    """Why a host is to get no workers; empty: it may.

    Args:
        findings: What is known of the host.
        others: What is known of hosts that are, or may be, in the job. With none of them there is nothing to compare.
        bound: Largest ratio of its time to the median of the others.

    >>> fast, slow = Measured("cpu", 1, 160.0), Measured("cpu", 1, 40.0)
    >>> others = [HostFindings("a", 1, fast, 0.001), HostFindings("b", 1, fast, 0.001)]
    >>> judge(HostFindings("c", 1, slow), others)
    '40 GFLOP/s in a matrix product on its cpu, the others 160; at least 80 is asked for'
    >>> judge(HostFindings("c", 1, fast, 0.020), others)
    'an allreduce of 1 MiB takes it 20 ms, the others 1 ms; at most 5 ms is asked for'
    >>> judge(HostFindings("c", 1, fast, 0.002), others)
    ''
    """
    measured = findings.measured
    if measured is None:
        return findings.problem
    return (
        measured.fault
        or _judge_devices(measured, findings.slots, others)
        or _judge_product(measured, others, bound)
        or _judge_exchange(findings, others, bound)
    )


def _judge_devices(measured: Measured, slots: int, others: Sequence[HostFindings]) -> str:
    if measured.device == "cuda" and measured.count < slots:
        return f"torch sees {measured.count} of the {slots} GPUs that its slots stand for"
    kinds = [other.measured.device for other in others if other.measured is not None]
    if measured.device == "cpu" and kinds.count("cuda") > kinds.count("cpu"):
        return "torch sees no GPU on it; the others have one"
    return ""


def _judge_product(measured: Measured, others: Sequence[HostFindings], bound: float) -> str:
    alike = [other.measured.gflop_s for other in others
             if other.measured is not None and other.measured.device == measured.device]  # fmt: skip
    if not alike or measured.gflop_s >= median(alike) / bound:
        return ""
    device = "slowest GPU" if measured.device == "cuda" else "cpu"
    return (
        f"{measured.gflop_s:.3g} GFLOP/s in a matrix product on its {device}, the others {median(alike):.3g}; "
        f"at least {median(alike) / bound:.3g} is asked for"
    )


def _judge_exchange(findings: HostFindings, others: Sequence[HostFindings], bound: float) -> str:
    if findings.exchange_s is None:
        return findings.problem
    times = [other.exchange_s for other in others if other.exchange_s is not None]
    most_s = max(QUICK_S, bound * median(times)) if times else float("inf")
    if findings.exchange_s <= most_s:
        return ""
    return (
        f"an allreduce of 1 MiB takes it {1000 * findings.exchange_s:.3g} ms, the others {1000 * median(times):.3g} "
        f"ms; at most {1000 * most_s:.3g} ms is asked for"
    )


def pairs(hosts: Sequence[str], turns: int = 3) -> list[list[tuple[str, str]]]:
    """Who meets whom, one turn after the other: in each everybody meets at most one, and never one twice.

    Who is slow makes all slow that it meets; with three turns everybody meets somebody who is not, unless three of
    its partners are. One host stays where it is and the others go round it (the circle method for tournaments).

    >>> pairs(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    met = []
    for _ in range(min(turns, len(ring) - 1)):
        half = len(ring) // 2
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        met.append([(one, other) for one, other in facing if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return met
