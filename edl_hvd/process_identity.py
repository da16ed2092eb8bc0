"""Telling a process from a later one that was given the same number, and whether its number means anything here."""

from __future__ import annotations

import os
from pathlib import Path


def boot() -> str:
    """Names the time since this machine was started; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Names the set of processes that this process sees by their numbers: of this boot, and of this container.

    Empty where that is not known.
    """
    try:
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}" if boot() else ""
    except OSError:
        return ""


def start_token(pid: int) -> str:
    """The boot and the moment at which this process was started; empty when there is no such process.

    A number and a token together name one process for good, over restarts of the machine too.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]  # proc(5): fields 3 and 22; the name before them may hold anything
    return "" if state in "ZX" or not boot() else f"{boot()} {start}"


def is_stopped(pid: int) -> bool:
    """Whether the process stands still by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def is_alive(pid: int, token: str) -> bool:
    """Whether the process that has this start token is still there."""
    return token != "" and start_token(pid) == token
