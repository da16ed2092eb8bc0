"""Takes over the state of a world that trains on, and keeps up with it until this worker joins; see ``donor.py``."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.tensor_threads import TensorThread
from edl_hvd.worker.codec import decode
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.standby.messages import LIMITS, StateMessage
from edl_hvd.worker.standby.messages import decode as to_message
from edl_hvd.worker.training.optimizer import is_distributed

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_SILENT_S = 600.0  # a step on slow hosts; a donor that dies is noticed by its connection
_AHEAD = 4  # messages read before they are applied: one arrives while another is repeated
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # mallopt(3)
_MOST_MAPPED_BLOCKS, _MAPPED_BYTES = 65536, 32 << 20
# As in any program that runs for a while: glibc raises the size of blocks that it maps one by one, up to 32 MB.
_OWN_TUNING = ("MALLOC_", "GLIBC_TUNABLES")
_libc = ctypes.CDLL(None)
# To get new memory from the system, and to give it back, takes longer than to receive into it.
_MOST_BUFFERS, _LEAST_BUFFER_BYTES = 1024, 1 << 20


class StandbyReplica:
    """The state of a standby, which one donor keeps up to date. A thread receives, the main thread applies.

    Args:
        store: State of the standby.
        address: Address of the donor.
        port: Port of the donor; 0 if it cannot send.
        secret: Line that proves to the donor that this is a worker of the job.
        deliver: Function that is given this object whenever :meth:`apply_next` has something to do; called in the
            receiving thread.

    Attributes:
        caught_up: Whether everything that has come is applied, up to a commit.
        synced: Whether the donor has left its world, and this worker holds the state of its last commit.
        closed: Whether nothing more will come.
    """

    def __init__(
        self, store: StateStore, address: str, port: int, secret: str, deliver: Callable[[StandbyReplica], None]
    ) -> None:
        self.caught_up = self.synced = self.closed = False
        self._store = store
        self._optimizers = list(store.of_kind(is_distributed))
        self._deliver = deliver
        self._messages: list[StateMessage | None] = []
        self._room = threading.Semaphore(_AHEAD)
        self._over = threading.Event()  # nothing more is to be applied
        self._has_stepped = threading.Event()  # this worker has joined, and taken a step of its own
        for optimizer in self._optimizers:
            optimizer.stepping.after.add(self._has_stepped.set)
        self._connection: socket.socket | None = None
        TensorThread(lambda: self._run(address, port, secret), "edl-standby").start()

    def abandon(self) -> None:
        """Stop, and hold no state."""
        self.closed = True
        self._over.set()
        if not self.synced:
            self._store.clear()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._room.release()

    def end_input(self) -> None:
        """Wait for nothing that has not come yet: the donor is dead. What has come is still delivered.

        The system closes the connection of a process that was killed once it has freed its memory, and that of a host
        that is lost never.
        """
        if self._connection is None:
            self.abandon()
            return
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def apply_next(self) -> None:
        """Apply the next message. Main thread."""
        message = self._messages.pop(0)
        self._room.release()
        if self.closed:
            return
        if message is None:
            self.closed = True
            self._over.set()
            if not self.synced:
                self._store.clear()
        elif message.what == "state":
            plain, light = message.plain
            self._store.load(plain, dict(message.tensors), light)
        elif message.what == "step":
            self._repeat(message)
        elif message.what == "commit":
            self.caught_up = self.caught_up or not self._messages
        elif message.what == "end":
            plain, light = message.plain
            self._store.apply_delta(plain, dict(message.tensors), light)
            # The end of the connection says no more, and comes late where the donor is killed now.
            self.synced = self.closed = True
            self._over.set()

    @torch.no_grad()
    def _repeat(self, step: StateMessage) -> None:
        number, options = step.plain
        optimizer = self._optimizers[number]
        if len(options) != len(optimizer.param_groups):
            self.abandon()  # the donor's has been given more parameters; the state comes with a wait
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        for place, gradient in step.tensors.items():
            parameter = parameters[int(place)]
            parameter.grad = _placed_like(parameter, gradient)
        for group, given in zip(optimizer.param_groups, decode(options, {}), strict=True):
            group.update(given)
        optimizer.repeat()
        optimizer.zero_grad()
        # Steps are not what the tracker looks for; it has not seen these, because no hook ran.
        self._store.tracker.stepped.accept_changes()

    def _run(self, address: str, port: int, secret: str) -> None:
        is_kept = _keep_freed_memory()
        self._read(address, port, secret)
        if is_kept:
            if self.synced:  # nothing can be allocated while memory is given back, and the others wait for this worker
                self._has_stepped.wait()
            _return_freed_memory()

    def _read(self, address: str, port: int, secret: str) -> None:
        buffers = BodyBuffers(_MOST_BUFFERS, _LEAST_BUFFER_BYTES)
        try:
            if port:
                with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
                    self._connection = connection
                    connection.sendall(secret.encode() + b"\n")
                    frames = FrameStream(connection, LIMITS)
                    while not self.closed:
                        message = to_message(frames.receive_next(_SILENT_S))
                        frames.buffers = buffers  # the state comes once, and takes as much as all steps
                        self._room.acquire()
                        self._pass_on(message)
        except EOFError:
            pass  # the donor has sent all, or is gone
        except (OSError, ProtocolError) as error:
            logger.info("taking the state over ended: %s", error)
        self._pass_on(None)
        self._over.wait()  # so that the memory goes back to the system in this thread, while the world forms

    def _pass_on(self, message: StateMessage | None) -> None:
        self._messages.append(message)
        self._deliver(self)


def _keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next step that is repeated; whether it does.

    An optimizer takes new memory for each step, as large as all gradients where there is weight decay. glibc gives such
    a block back to the system at once, and the next one comes page by page, cleared: more than half of the time of a
    step of SGD with 125 million weights.
    """
    if not hasattr(_libc, "mallopt") or any(name.startswith(_OWN_TUNING) for name in os.environ):
        return False
    _libc.mallopt(_M_MMAP_MAX, 0)
    _libc.mallopt(_M_TRIM_THRESHOLD, -1)
    return True


def _return_freed_memory() -> None:
    """Give to the system what was kept, and each large block from now on as soon as it is freed, as glibc does."""
    _libc.mallopt(_M_MMAP_MAX, _MOST_MAPPED_BLOCKS)
    _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_BYTES)
    _libc.malloc_trim(0)


def _placed_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient where and as its parameter lies; a copy only where it does not."""
    if gradient.device == parameter.device and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
