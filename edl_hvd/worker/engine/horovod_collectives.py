"""The collectives of a Horovod world."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from edl_hvd.errors import UsageError, WorldBrokenError
from edl_hvd.worker.engine import mended
from edl_hvd.worker.engine.stall_inspector import StalledCollective, StallInspector
from edl_hvd.worker.progress import LONGEST_NAME, progress

_OPERATIONS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
# What Horovod reduces, and what it moves, on a CPU and on a GPU. Others are reduced as float32, and moved as bytes.
_REDUCED = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}
_MOVED = _REDUCED | {torch.uint8, torch.int8}
# Horovod's own wait spins, on a core that computes elsewhere. Its thread answers once per millisecond. A wait is looked
# at again after a fiftieth of its length: who has waited for seconds leaves the core to whoever is waited for.
_POLL_S, _LONGEST_POLL_S, _POLLS_OF_A_WAIT = 0.0001, 0.01, 50


@dataclass(frozen=True)
class WorldFailure:
    """The loss of a member, with which a world ends.

    Attributes:
        reason: Name of the member, for people.
        since_s: Time at which the loss became known, by ``time.monotonic()``.
        grace_s: Seconds that a collective may wait after that, or after its own beginning.
    """

    reason: str
    since_s: float
    grace_s: float


class HorovodCollectives:
    """See :class:`edl_hvd.worker.engine.collectives.Collectives`; runs on whatever Horovod was built with.

    Names are constant per purpose: Horovod negotiates a name it has seen before from its cache.

    Args:
        failure: Function for the failure of this world; ``None`` while there is none.
        stall_inspector: Inspector of members that wait for each other; ``None`` where a driver finds them.

    Attributes:
        started: Number of times that each collective was started, by name.
    """

    def __init__(
        self,
        failure: Callable[[], WorldFailure | None] = lambda: None,
        stall_inspector: StallInspector | None = None,
    ) -> None:
        self._failure = failure
        self._stall_inspector = stall_inspector
        self.started: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # of collectives that are under way, by handle
        self._rounded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the caller's tensor, and what is summed
        progress.waits = 0

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> int:
        summed = _reducible(tensor)
        # Horovod has a factor of its own, but refuses ranks that give different ones.
        if scale != 1.0:
            summed.mul_(scale)
        handle = self._start(hvd.allreduce_async_, name, _in_memory_order(summed), op=hvd.Sum)
        if summed is not tensor:
            self._rounded[handle] = tensor, summed
        return handle

    def finish(self, handles: Sequence[int]) -> None:
        with self._translated(), progress.waiting():
            for handle in handles:
                self._finish(handle)
                if handle in self._rounded:
                    tensor, summed = self._rounded.pop(handle)
                    tensor.copy_(summed)

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> int:
        return self._start(hvd.alltoall_async, name, tensor, torch.tensor(sizes, dtype=torch.int32))

    def start_gather(self, tensor: torch.Tensor, name: str) -> int:
        return self._start(hvd.allgather_async, name, tensor)

    def result(self, handle: int) -> torch.Tensor:
        with self._translated(), progress.waiting():
            result = self._finish(handle)
        tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return tensor

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        with torch.inference_mode(False):  # of such tensors there are no views
            result = _reducible(tensor.detach()).clone(memory_format=torch.contiguous_format)
        name = name or f"edl_hvd.{op}.{tuple(tensor.shape)}"
        self.finish([self._start(hvd.allreduce_async_, name, result, op=_OPERATIONS[op])])
        return result.to(tensor.dtype)

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        moved = tensor if tensor.dtype in _MOVED else tensor.view(-1).view(torch.uint8)
        self.finish([self._start(hvd.broadcast_async_, name or "edl_hvd.broadcast", moved, root)])

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        given = torch.tensor([list(row)], dtype=torch.int64)
        rows: list[list[int]] = self.result(self.start_gather(given, name or "edl_hvd.gather")).tolist()
        return rows

    def _start(self, call: Callable[..., int], name: str, *arguments: Any, **options: Any) -> int:
        with self._translated():
            handle = call(*arguments, name=name, **options)
        name = self._names[handle] = name[:LONGEST_NAME]
        self.started[name] += 1
        return handle

    def _finish(self, handle: int) -> Any:
        progress.collective = name = self._names.pop(handle, "")
        inspector, started_s = self._stall_inspector, time.monotonic()
        stalled: StalledCollective | None = None
        try:
            while not hvd.poll(handle):
                now_s, failure = time.monotonic(), self._failure()
                if failure is not None and now_s - max(failure.since_s, started_s) > failure.grace_s:
                    mended.abort(True)  # the collective ends with an error
                waited_s = now_s - started_s
                if inspector is not None and waited_s > inspector.timeout_s:
                    stalled = stalled or StalledCollective(inspector, name, self.started)
                    stalled.look()
                time.sleep(min(max(_POLL_S, waited_s / _POLLS_OF_A_WAIT), _LONGEST_POLL_S))
        finally:
            if stalled is not None:
                stalled.end()
        return hvd.synchronize(handle)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except HorovodInternalError as error:
            if "Mismatched" in str(error):
                raise UsageError(
                    f"the workers called different collectives: {error}; every worker must build the same model and "
                    "run the same commits, allreduces and epochs"
                ) from error
            failure = self._failure()
            who = f"{failure.reason} is gone" if failure is not None else "probably because a member is gone"
            raise WorldBrokenError(f"a collective failed, {who}: {error}") from error


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its numbers as float32."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.dtype not in _REDUCED else tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view: Horovod insists on contiguous tensors, and a channels-last gradient is not one.

    A complex one as pairs of real numbers: Horovod knows no complex ones.
    """
    strides = tensor.stride()
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])).view(-1)
    return torch.view_as_real(flat) if flat.is_complex() else flat
