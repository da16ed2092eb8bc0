"""Gives the state of this worker to newcomers while it trains on, so that their joining costs nobody a wait.

A newcomer gets the last commit, and after it what every optimizer step is made of: the summed gradients and the
options of the parameter groups. It repeats the steps, which takes a fraction of computing them, and so keeps up. When
the world is left for one with the newcomer in it, the little that no step explains follows: attributes, buffers,
counters.

The last commit is copied once for this, unless it is a copy already. All calls are the main thread's, but for
``invite`` and the sending.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.tensor_threads import TensorThread
from edl_hvd.worker.codec import encode
from edl_hvd.worker.commits.dirty import TensorVersion, versions_of
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.newcomers.frames import Frame, send
from edl_hvd.worker.training.optimizer import is_distributed

logger = logging.getLogger(__name__)

_CALL_S = 30.0  # a newcomer calls at once; a busy machine takes its time
_LEAST_QUEUE_BYTES = 256 << 20  # small states may lag for longer
_LONGEST_HELLO_BYTES = 4096


class Guide:
    """The side of one worker that hands its state on to newcomers.

    Args:
        store: State of the worker.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._optimizers = list(store.of_kind(is_distributed))
        self._streams: list[_Stream] = []
        self._versions: list[int] = []  # of the parameters, as the last step left them
        for number, optimizer in enumerate(self._optimizers):
            optimizer.stepping.before.append(
                lambda optimizer, closure, number=number: self._on_step(number, optimizer, closure)
            )
            optimizer.stepping.after.append(self._note_versions)

    def invite(self, address: str, secret: str) -> int:
        """Wait for the call of one newcomer, who has to know the secret; the port. Any thread; does not block."""
        stream = _Stream(address, secret)
        self._streams = [*self._streams, stream]
        return stream.port

    def commit(self) -> None:
        """The world has agreed on the last commit."""
        streams = self._active()
        if any(stream.origin for stream in streams) and self._versions != self._present_versions():
            logger.info("the script moves weights besides its optimizers; newcomers join with a wait")
            self.abandon()
            return
        for stream in streams:
            if stream.origin is None and stream.connected and self._optimizers:
                plain, tensors = self._store.pin()
                origin = _Origin.of(self._store, tensors)
                stream.begin(origin, Frame("state", [plain, list(tensors)], list(tensors.values())))
                self._versions = self._present_versions()
            elif stream.origin is not None:
                stream.put(Frame("commit", self._store.commit))

    def end(self) -> None:
        """This world is left at the last commit."""
        for stream in self._active():
            if stream.origin is not None:
                plain, moved = self._rest(stream.origin)
                stream.put(Frame("end", [plain, list(moved)], list(moved.values())))
                stream.put(None)
            else:
                stream.close()
        self._streams = []

    def abandon(self) -> None:
        """This world is left."""
        for stream in self._streams:
            stream.close()
        self._streams = []

    def _active(self) -> list[_Stream]:
        self._streams = [stream for stream in self._streams if not stream.over]
        return self._streams

    def _on_step(self, number: int, optimizer: Any, closure: bool) -> None:
        streams = [stream for stream in self._streams if stream.origin is not None]
        if not streams:
            return
        frame = None if closure else _step_frame(number, optimizer)
        for stream in streams:
            stream.put(frame)

    def _note_versions(self) -> None:
        if self._streams:
            self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter._version for group in groups for parameter in group["params"]]

    def _rest(self, origin: _Origin) -> tuple[Any, dict[str, torch.Tensor]]:
        """What the newcomer cannot know from the commit it began with and the steps since."""
        plain, live = self._store.live(self._store.commit)
        stepped = _stepped(self._optimizers)
        moved = {
            name: tensor.detach().clone()
            for name, tensor in live.items()
            if tensor.data_ptr() not in stepped and not origin.explains(name, tensor)
        }
        return plain, moved


@dataclass(frozen=True)
class _Origin:
    """The commit that a newcomer began with.

    Attributes:
        versions: Of the live tensors then.
        buffers: The models' buffers as they were.
    """

    versions: dict[str, TensorVersion]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, store: StateStore, frozen: dict[str, torch.Tensor]) -> _Origin:
        live = store.live(store.commit)[1]
        models = store.of_kind(torch.nn.Module)
        addresses = {buffer.data_ptr() for model in models for buffer in model.buffers()}
        buffers = {name: frozen[name] for name, tensor in live.items() if tensor.data_ptr() in addresses}
        return cls(versions_of(live), buffers)

    def explains(self, name: str, tensor: torch.Tensor) -> bool:
        """The tensor is as it was."""
        if name not in self.versions or not self.versions[name].matches(tensor):
            return False
        # BatchNorm writes its statistics without counting a version.
        return name not in self.buffers or torch.equal(tensor, self.buffers[name])


def _stepped(optimizers: Iterable[Any]) -> set[int]:
    """Addresses of what optimizer steps move: parameters, and the optimizers' own tensors."""
    parameters = {p.data_ptr() for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return parameters | {
        tensor.data_ptr() for optimizer in optimizers for tensor in encode(optimizer.state_dict(), "")[1].values()
    }


def _step_frame(number: int, optimizer: Any) -> Frame | None:
    """What the step that is about to be taken is made of; ``None`` if it takes more than can be sent."""
    options, tensors = encode([_options(group) for group in optimizer.param_groups], "")
    if tensors:
        return None
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    there = [i for i, gradient in enumerate(gradients) if gradient is not None]
    copies = [torch.empty(gradients[i].shape, dtype=gradients[i].dtype) for i in there]
    for copy, i in zip(copies, there, strict=True):
        copy.copy_(gradients[i])
    return Frame("step", [number, options, there], copies)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _Stream:
    """To one newcomer; a thread waits for its call and sends.

    Attributes:
        port: Where it is to call.
        origin: What it began with, once it has begun.
        connected: It has called.
        over: Nobody listens any more.
    """

    def __init__(self, address: str, secret: str) -> None:
        self.origin: _Origin | None = None
        self.connected = self.over = False
        self._secret = secret
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._put_bytes = self._sent_bytes = 0  # each is written by one thread
        self._most_bytes = _LEAST_QUEUE_BYTES
        self._connection: socket.socket | None = None
        self._listener = socket.create_server((address, 0))
        self._listener.settimeout(_CALL_S)
        self.port: int = self._listener.getsockname()[1]
        TensorThread(self._run, "edl-guide").start()

    def begin(self, origin: _Origin, state: Frame) -> None:
        self.origin = origin
        # What can wait while the state is on its way: as much as that again.
        self._most_bytes = max(_LEAST_QUEUE_BYTES, 2 * state.size_bytes)
        self.put(state)

    def put(self, frame: Frame | None) -> None:
        """Send a frame in its turn, or hang up."""
        size_bytes = frame.size_bytes if frame is not None else 0
        if self._put_bytes - self._sent_bytes + size_bytes > self._most_bytes:
            logger.info("a newcomer cannot keep up with the training; it joins with a wait")
            frame, self.over = None, True
        self._put_bytes += size_bytes
        self._frames.put(frame)

    def close(self) -> None:
        """Hang up at once."""
        self.over = True
        self._frames.put(None)
        with suppress(OSError):
            (self._connection or self._listener).shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with suppress(OSError), self._call() as connection:
            self._connection, self.connected = connection, True
            while (frame := self._frames.get()) is not None and not self.over:
                send(connection, frame)
                self._sent_bytes += frame.size_bytes
        self.over = True

    def _call(self) -> socket.socket:
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(_CALL_S)
                hello = connection.makefile("rb").readline(_LONGEST_HELLO_BYTES)
                if hmac.compare_digest(hello.rstrip(b"\n"), self._secret.encode()):
                    return connection
                connection.close()  # a stranger
