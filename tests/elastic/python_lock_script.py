"""One of two ranks: counts how often Horovod's thread asks for Python's lock while it serves each kind of collective.

A thread that Python does not know gets a state in Python then, and each state has a number of its own.
"""

import ctypes
import json
import threading
from collections.abc import Callable

import horovod.torch as hvd
import torch

from edl_hvd.worker.engine.horovod_collectives import HorovodCollectives

TIMES = 100

torch.set_num_threads(1)
hvd.init()
collectives = HorovodCollectives()
ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
ctypes.pythonapi.PyThreadState_GetID.restype = ctypes.c_uint64
ctypes.pythonapi.PyThreadState_GetID.argtypes = [ctypes.c_void_p]
row = torch.ones(3)


def next_state() -> int:
    """The number of a new thread's state."""
    numbers: list[int] = []

    def look() -> None:
        numbers.append(ctypes.pythonapi.PyThreadState_GetID(ctypes.pythonapi.PyThreadState_Get()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return numbers[0]


def sum_in_place() -> None:
    collectives.finish([collectives.start_sum(row, "sum", 0.5)])


def exchange() -> None:
    collectives.result(collectives.start_exchange(torch.ones(4), [1, 3], "exchange"))


def gather() -> None:
    collectives.result(collectives.start_gather(torch.ones(hvd.rank() + 1), "gather"))


def reduce_an_inference_tensor() -> None:
    with torch.inference_mode():
        collectives.allreduce(torch.ones(3), "max")


KINDS: dict[str, Callable[[], object]] = {
    "sum": sum_in_place,
    "exchange": exchange,
    "gather": gather,
    "allreduce": lambda: collectives.allreduce(torch.ones(3), "sum"),
    "allreduce of an inference tensor": reduce_an_inference_tensor,
    "broadcast": lambda: collectives.broadcast_(row, 0),
    "integers": lambda: collectives.gather_integers([1, 2]),
    "Horovod's own allreduce": lambda: hvd.allreduce(torch.ones(3), name="horovod"),
    # Which shows that the count is one.
    "a thread of Python's": next_state,
}
asked = {}
for kind, act in KINDS.items():
    first = next_state()
    for _ in range(TIMES):
        act()
    asked[kind] = next_state() - first - 1
print(json.dumps(asked))
hvd.shutdown()
