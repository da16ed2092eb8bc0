"""Forked processes of a worker, such as a data loader's, neither outlive it nor keep its connections open.

They are forked with copies of all descriptors, and when their worker is killed they live on for some
seconds. While they hold its connections open the other members see nothing, and while they hold its
output open ``horovodrun`` does not see that it ended (``safe_shell_exec.execute`` reads to the end before
it returns).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_closed_on_fork: frozenset[tuple[int, str]] | None = None
_forked_by_main_thread = True


def open_sockets() -> frozenset[tuple[int, str]]:
    """The sockets that this process has open, as (descriptor, inode name).

    The inode is kept because a closed descriptor's number is given out again.
    """
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(FileNotFoundError):
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:"):
                    found.add((int(name), target))
    return frozenset(found)


def close_on_fork(sockets: frozenset[tuple[int, str]]) -> None:
    """Have every process forked from now on close these sockets, and die with this one.

    Replaces the sockets named before.
    """
    global _closed_on_fork
    if _closed_on_fork is None:
        os.register_at_fork(before=_before_fork, after_in_child=_after_in_child)
    _closed_on_fork = sockets


def _before_fork() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _after_in_child() -> None:
    for descriptor, _ in (_closed_on_fork or frozenset()) & open_sockets():
        with suppress(OSError):
            os.close(descriptor)
    prctl = getattr(_LIBC, "prctl", None)  # Linux only
    # The kernel's "parent" is the thread that forked; only the main thread's end is the worker's end.
    if prctl is not None and _forked_by_main_thread:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
