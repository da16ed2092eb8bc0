"""Takes over the state of a world that trains on, and keeps up with it until it joins; see ``guide.py``."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from edl_hvd.errors import RendezvousError
from edl_hvd.tensor_threads import TensorThread
from edl_hvd.worker.codec import decode
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.newcomers.frames import Frame, receive
from edl_hvd.worker.training.optimizer import is_distributed

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_SILENT_S = 600.0  # a step on slow hosts; a guide that dies is noticed by its connection
_AHEAD = 4  # frames read before they are worked through: one arrives while another is repeated


class Following:
    """One newcomer following one guide. A thread reads, the main thread works through what came.

    Args:
        store: State of this worker.
        address: Of the guide.
        port: Of the guide; 0 if it cannot guide.
        secret: Proves to the guide that this is a worker of the job.
        deliver: Is given this object whenever :meth:`work` has something to do; called in the reading thread.

    Attributes:
        level: Everything that has come is worked through, up to a commit.
        complete: The guide has left its world, and this worker holds the state of its last commit.
        over: Nothing more will come.
    """

    def __init__(
        self, store: StateStore, address: str, port: int, secret: str, deliver: Callable[[Following], None]
    ) -> None:
        self.level = self.complete = self.over = False
        self._store = store
        self._optimizers = list(store.of_kind(is_distributed))
        self._deliver = deliver
        self._frames: list[Frame | None] = []
        self._room = threading.Semaphore(_AHEAD)
        self._connection: socket.socket | None = None
        TensorThread(lambda: self._read(address, port, secret), "edl-follower").start()

    def abandon(self) -> None:
        """Stop; what was taken over so far is of no use."""
        self.over = True
        if not self.complete:
            self._store.clear()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._room.release()

    def work(self) -> None:
        """Work through the next frame. Main thread."""
        frame = self._frames.pop(0)
        self._room.release()
        if self.over:
            return
        if frame is None:
            self.over = True
            if not self.complete:
                self._store.clear()
        elif frame.what == "state":
            plain, names = frame.plain
            self._store.load(plain, dict(zip(names, frame.tensors, strict=True)))
        elif frame.what == "step":
            self._repeat(frame)
        elif frame.what == "commit":
            if not self._frames:
                self._store.save(frame.plain)  # so that there is less to copy at the end
                self.level = True
        elif frame.what == "end":
            plain, names = frame.plain
            self._store.apply_delta(plain, dict(zip(names, frame.tensors, strict=True)))
            self.complete = True

    @torch.no_grad()
    def _repeat(self, frame: Frame) -> None:
        number, options, places = frame.plain
        optimizer = self._optimizers[number]
        if len(options) != len(optimizer.param_groups):
            self.abandon()  # it has been given more parameters; the state comes with a wait
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        for place, gradient in zip(places, frame.tensors, strict=True):
            parameters[place].grad = torch.empty_like(parameters[place]).copy_(gradient)
        for group, given in zip(optimizer.param_groups, decode(options, {}), strict=True):
            group.update(given)
        optimizer.repeat()
        optimizer.zero_grad()

    def _read(self, address: str, port: int, secret: str) -> None:
        try:
            if port:
                with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
                    self._connection = connection
                    connection.settimeout(_SILENT_S)
                    connection.sendall(secret.encode() + b"\n")
                    with connection.makefile("rb") as stream:
                        while not self.over and (frame := receive(stream)) is not None:
                            self._room.acquire()
                            self._pass_on(frame)
        except (OSError, RendezvousError) as error:
            logger.info("following the world ended: %s", error)
        self._pass_on(None)

    def _pass_on(self, frame: Frame | None) -> None:
        self._frames.append(frame)
        self._deliver(self)
