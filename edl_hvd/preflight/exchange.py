"""A small allreduce of two hosts, over the network that their workers would use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

from edl_hvd.errors import PlatformError
from edl_hvd.network_interface import interface_of

EXCHANGE_BYTES = 1 << 20
_TIMES = 30
_WAIT_S = 10.0
# For each thing that the other one does: to listen, to connect, to answer.


def exchange(own: str, other: str, port: int | None, interface: str | None, listening: Callable[[int], None]) -> float:
    """Sum a vector of float32 with another host several times. Blocks; the other one calls this, too.

    Gloo on the CPU, as under Horovod without NCCL: what a GPU's own network can do is not measured.

    Args:
        own: The address at which the other host reaches this one.
        other: The address at which the two meet; for the one that listens, its own.
        port: The port there; ``None`` makes this the one that listens.
        interface: Network interface to use; ``None``: that which has the address ``own``.
        listening: Told the port, where this one listens.

    Returns:
        The fastest, in seconds.

    Raises:
        PlatformError: The hosts do not reach each other, or the sum is wrong.
    """
    import torch
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = interface or interface_of(own)
    timeout = timedelta(seconds=_WAIT_S)
    try:
        leads = port is None
        store = distributed.TCPStore(other, port or 0, 2, leads, timeout, wait_for_workers=False)
        if leads:
            listening(store.port)
        distributed.init_process_group("gloo", store=store, rank=0 if leads else 1, world_size=2, timeout=timeout)
        try:
            fastest_s = float("inf")
            for _ in range(_TIMES):
                vector = torch.ones(EXCHANGE_BYTES // 4)
                start_s = time.perf_counter()
                distributed.all_reduce(vector)
                fastest_s = min(fastest_s, time.perf_counter() - start_s)
                if not bool((vector == 2).all()):
                    raise ArithmeticError("the sum of ones on two hosts is not two everywhere")
        finally:
            distributed.destroy_process_group()
    except (RuntimeError, ValueError, ArithmeticError) as error:
        raise PlatformError(f"no allreduce with {other}: {str(error).splitlines()[0]}") from error
    return fastest_s
