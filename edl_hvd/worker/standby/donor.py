"""Gives the state of this worker to standbys while it trains on, so that no member waits when they join.

A standby gets the last commit, and after it what every optimizer step is made of: the summed gradients and the
options of the parameter groups. It repeats the steps, which takes a fraction of computing them, and so keeps up. When
the world is left for one with the standby in it, the donor sends what no step has moved: attributes, buffers,
counters.

The last commit is copied once for this, unless it is a copy already. Gradients on the CPU are not: they are sent from
where they lie, beside the step that they are for. If something writes to them meanwhile, the transfer ends, and the
next one sends copies. All calls are the main thread's, but for ``serve`` and the sending.
"""

from __future__ import annotations

import logging
import queue
import socket
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.frame_stream import FrameStream
from edl_hvd.tensor_threads import TensorThread
from edl_hvd.worker.codec import encode
from edl_hvd.worker.commits.dirty import TensorVersion, versions_of
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.standby.admission import admit
from edl_hvd.worker.standby.messages import StateMessage
from edl_hvd.worker.standby.messages import encode as to_frame
from edl_hvd.worker.trace import TensorTrace
from edl_hvd.worker.training.optimizer import is_distributed

logger = logging.getLogger(__name__)

_CALL_S = 30.0  # a standby connects at once; a busy machine takes its time
_SILENT_S = 30.0  # without a byte taken
_LEAST_QUEUE_BYTES = 256 << 20  # small states may lag for longer


class StateDonor:
    """The side of one member that sends its state to standbys.

    Args:
        store: State of the member.

    Attributes:
        streams: Transfers under way, one for each standby; empty most of the time.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._optimizers = list(store.of_kind(is_distributed))
        self.streams: list[_Stream] = []
        self._is_hooked = False
        self._copies = False  # whether gradients on the CPU are copied, too
        self._spare_copies: list[dict[str, torch.Tensor]] = []  # memory of gradients that are sent
        self._versions: list[int] = []  # of the parameters, as the last step left them

    def serve(self, address: str, secret: str) -> int:
        """Wait in a thread for the connection of one standby. Any thread; does not block.

        Args:
            address: Address of this host to listen at.
            secret: Line with which the standby proves that it is a worker of the job.

        Returns:
            The port; 0 where no distributed optimizer says what a step is made of. Then the standby takes the state
            over when it joins, and the others wait for it.
        """
        if not self._optimizers:
            return 0
        stream = _Stream(address, secret, self._copy_from_now_on)
        self.streams = [*self.streams, stream]
        return stream.port

    def _copy_from_now_on(self) -> None:
        self._copies = True

    def commit(self) -> None:
        """Send the last commit, which the world has agreed on, or tell of it."""
        streams = self._active()
        if any(stream.base for stream in streams) and self._versions != self._present_versions():
            logger.info("the script moves weights besides its optimizers; standbys join with a wait")
            self.abandon()
            return
        for stream in streams:
            if stream.base is None and stream.connected:
                self._hook_steps()
                light = self._store.is_light
                plain, tensors = self._store.pin()
                base = _BaseSnapshot.of(self._store, tensors)
                stream.begin(base, StateMessage("state", [plain, light], tensors))
                self._versions = self._present_versions()
            elif stream.base is not None:
                stream.put(StateMessage("commit"))

    def end(self) -> None:
        """Send the rest of the last commit, at which this world is left, and end all transfers."""
        for stream in self._active():
            if stream.base is not None:
                plain, moved = self._delta_since(stream.base)
                stream.put(StateMessage("end", [plain, self._store.is_light], moved))
                stream.put(None)
            else:
                stream.close()
        self._forget_streams()

    def abandon(self) -> None:
        """End all transfers at once."""
        for stream in self.streams:
            stream.close()
        self._forget_streams()

    def _forget_streams(self) -> None:
        self.streams = []
        self._spare_copies = []

    def _active(self) -> list[_Stream]:
        self.streams = [stream for stream in self.streams if not stream.closed]
        return self.streams

    def _hook_steps(self) -> None:
        """Send what every step is made of from now on."""
        if self._is_hooked:
            return
        self._is_hooked = True
        for optimizer in self._optimizers:
            optimizer.stepping.before.add(self._on_step)
            optimizer.stepping.after.add(self._note_versions)

    def _on_step(self, optimizer: Any, closure: bool) -> None:
        streams = [stream for stream in self.streams if stream.base is not None]
        if not streams:
            return
        message = None if closure else self._step_message(self._optimizers.index(optimizer), optimizer)
        for stream in streams:
            stream.put(message)

    def _step_message(self, number: int, optimizer: Any) -> StateMessage | None:
        """What the step that is about to be taken is made of; ``None`` if it takes more than can be sent."""
        options, tensors = encode([_options(group) for group in optimizer.param_groups], "")
        if tensors:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = {str(place): p.grad.detach() for place, p in enumerate(parameters) if p.grad is not None}
        if any(gradient.layout is not torch.strided for gradient in gradients.values()):
            return None
        if not self._copies and all(gradient.is_cpu for gradient in gradients.values()):
            return StateMessage("step", [number, options], gradients, TensorTrace(list(gradients.values())))
        copies, spare = {}, self._spare_copies.pop() if self._spare_copies else {}
        for place, gradient in gradients.items():
            copy = spare.get(place)
            if copy is None or copy.shape != gradient.shape or copy.dtype != gradient.dtype:
                copy = torch.empty(gradient.shape, dtype=gradient.dtype)
            copies[place] = copy.copy_(gradient)
        message = StateMessage("step", [number, options], copies)
        # New memory takes longer than the copy: its pages come from the kernel one by one.
        weakref.finalize(message, self._spare_copies.append, copies).atexit = False
        return message

    def _note_versions(self) -> None:
        if self.streams:
            self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter._version for group in groups for parameter in group["params"]]

    def _delta_since(self, base: _BaseSnapshot) -> tuple[Any, dict[str, torch.Tensor]]:
        """The part of the last commit that a standby cannot know from its base and the steps since."""
        plain, live = self._store.live(self._store.commit)
        stepped = _stepped(self._optimizers)
        moved = {
            name: tensor.detach().clone()
            for name, tensor in live.items()
            if tensor.data_ptr() not in stepped and not base.is_unchanged(name, tensor)
        }
        return plain, moved


@dataclass(frozen=True)
class _BaseSnapshot:
    """The commit that a standby began with.

    Attributes:
        versions: Versions of the live tensors at that commit.
        buffers: The models' buffers at that commit.
    """

    versions: dict[str, TensorVersion]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, store: StateStore, frozen: dict[str, torch.Tensor]) -> _BaseSnapshot:
        live = store.live(store.commit)[1]
        models = store.of_kind(torch.nn.Module)
        addresses = {buffer.data_ptr() for model in models for buffer in model.buffers()}
        buffers = {name: frozen[name] for name, tensor in live.items() if tensor.data_ptr() in addresses}
        return cls(versions_of(live), buffers)

    def is_unchanged(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a live tensor is what it was at that commit."""
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


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _Stream:
    """The transfer to one standby; a thread waits for its connection and sends.

    Args:
        address, secret: As for :meth:`StateDonor.serve`.
        on_torn: Function that is called when the transfer ends because a tensor was written to while it was sent.

    Attributes:
        port: Port that the standby connects to.
        base: Commit that the standby began with; ``None`` before it has begun.
        connected: Whether the standby has connected.
        closed: Whether the transfer has ended.
    """

    def __init__(self, address: str, secret: str, on_torn: Callable[[], None]) -> None:
        self.base: _BaseSnapshot | None = None
        self.connected = self.closed = False
        self._secret = secret
        self._on_torn = on_torn
        self._messages: queue.SimpleQueue[StateMessage | None] = queue.SimpleQueue()
        self._put_bytes = self._sent_bytes = 0  # each is written by one thread
        self._most_bytes = _LEAST_QUEUE_BYTES
        self._connection: socket.socket | None = None
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        TensorThread(self._run, "edl-donor").start()

    def begin(self, base: _BaseSnapshot, state: StateMessage) -> None:
        self.base = base
        # What can wait while the state is on its way: as much as that again.
        self._most_bytes = max(_LEAST_QUEUE_BYTES, 2 * state.size_bytes)
        self.put(state)

    def put(self, message: StateMessage | None) -> None:
        """Send a message after those before it; ``None`` ends the transfer."""
        size_bytes = message.size_bytes if message is not None else 0
        if self._put_bytes - self._sent_bytes + size_bytes > self._most_bytes:
            logger.info("a standby cannot keep up with the training; it joins with a wait")
            message, self.closed = None, True
        self._put_bytes += size_bytes
        self._messages.put(message)

    def close(self) -> None:
        """End the transfer at once."""
        self.closed = True
        self._messages.put(None)
        with suppress(OSError):
            (self._connection or self._listener).shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with suppress(OSError), self._admit() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the last word is short, and waited for
            frames = FrameStream(connection)
            self._connection, self.connected = connection, True
            while (message := self._messages.get()) is not None and not self.closed:
                frames.send(to_frame(message), _SILENT_S)
                self._sent_bytes += message.size_bytes
                if message.trace is not None and not message.trace.fits():
                    logger.info("gradients were written to while they were sent; a standby joins with a wait")
                    self._on_torn()
                    break
            # A process that was forked meanwhile, such as a data loader's, has a copy of the connection. While it holds
            # that open, to close it here would not tell the standby that all is sent.
            connection.shutdown(socket.SHUT_RDWR)
        self.closed = True

    def _admit(self) -> socket.socket:
        with self._listener:
            return admit(self._listener, self._secret, _CALL_S)
