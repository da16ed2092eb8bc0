"""Telling a process from a later one that was given the same number."""

from __future__ import annotations

from pathlib import Path


def mark_of(pid: int) -> str:
    """The boot and the moment at which this process was started; empty when there is no such process.

    A number and a mark together name one process for good, over restarts of the machine too.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]  # proc(5): fields 3 and 22; the name before them may hold anything
    return "" if state in "ZX" else f"{boot} {start}"


def lives(pid: int, mark: str) -> bool:
    """Whether the process that was given this mark is still there."""
    return mark != "" and mark_of(pid) == mark
