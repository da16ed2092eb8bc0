"""A signal for a process that another thread takes than the main one, as the system may have it."""

from __future__ import annotations

import ctypes
import os


def signal_another_thread(pid: int, number: int) -> None:
    """Send the signal to a thread of the process that is not its main one.

    Raises:
        ProcessLookupError: The process has no other thread, or that one has ended.
    """
    others = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    if not others or ctypes.CDLL(None).tgkill(pid, others[0], number):
        raise ProcessLookupError(f"process {pid} has no other thread")
