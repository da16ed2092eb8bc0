"""Which time slice each thread has, by Linux's own account."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_GET = {"x86_64": 315, "aarch64": 275}
_SET = {"x86_64": 314, "aarch64": 274}
_FORMAT = "IIQiIQQQ"  # struct sched_attr


def has_slices_of_threads() -> bool:
    """Whether each thread may have a slice of its own here: since Linux 6.12."""
    release = platform.release().split(".")
    return platform.system() == "Linux" and platform.machine() in _GET and [int(n) for n in release[:2]] >= [6, 12]


def slice_of(thread: int = 0) -> tuple[int, int, int]:
    """Its policy, nice value and slice in nanoseconds; of the calling thread if no number is given."""
    buffer = ctypes.create_string_buffer(struct.calcsize(_FORMAT))
    if ctypes.CDLL(None, use_errno=True).syscall(_GET[platform.machine()], thread, buffer, len(buffer), 0):
        raise OSError(ctypes.get_errno(), "sched_getattr")
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack(_FORMAT, buffer.raw[: struct.calcsize(_FORMAT)])
    return policy, nice, slice_ns


def forget_slice() -> None:
    """Give the calling thread the system's own slice, whatever it has inherited."""
    attributes = struct.pack(_FORMAT, struct.calcsize(_FORMAT), 0, 0, os.nice(0), 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(_SET[platform.machine()], 0, attributes, 0):
        raise OSError(ctypes.get_errno(), "sched_setattr")


def slices_of_process(pid: int) -> dict[str, int]:
    """In nanoseconds, by name and number of the thread."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/comm") as name:
            found[f"{name.read().strip()} {thread}"] = slice_of(int(thread))[2]
    return found
