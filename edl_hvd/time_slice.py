"""Short time slices of the processor, so that threads that mostly wait are not kept waiting by those that compute.

Where more threads want to compute than there are processors, Linux lets the one with the earliest deadline go first,
and the deadline of a thread is as far away as its slice is long. To leave a world and to form the next one takes some
ten wake-ups, one after the other, and each waits for the threads whose deadlines are earlier. A thread with a short
slice gets the same share of the processors, in smaller pieces and sooner (Documentation/scheduler/sched-eevdf.rst).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SLICE_NS = 100_000
# The shortest that Linux gives. Its own is 0.7 ms with one processor, 1.4 with two, 2.8 with eight and more.
_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
# sched_getattr and sched_setattr; the C library has functions for them since glibc 2.41 only.
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
_POLICY, _SLICE_FIELD = 1, 5
# struct sched_attr in linux/sched/types.h: the policy, and sched_runtime.


def ask_for_short_time_slices() -> bool:
    """Give the calling thread short slices, and what it starts from now on: threads and processes.

    The main thread calls it before it starts others. Needs no privilege; does not block. Linux before 6.12 knows one
    length for all threads and ignores this one. A thread whose policy is not the usual one (``chrt``) keeps its own.

    Returns:
        Whether the system took it. ``False``: another system or processor, another policy, or it is forbidden.
    """
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        return False
    get, change = _CALLS[platform.machine()]
    call = ctypes.CDLL(None).syscall
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get, 0, buffer, _ATTRIBUTES.size, 0):
        return False
    attributes = list(_ATTRIBUTES.unpack(buffer.raw))
    if attributes[_POLICY] != os.SCHED_OTHER:
        return False
    attributes[_SLICE_FIELD] = _SLICE_NS
    _ATTRIBUTES.pack_into(buffer, 0, *attributes)
    return not call(change, 0, buffer, 0)
