"""What a job keeps: the things given to ``State``, the counters of the run, and the last commit of both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore_newest
from edl_hvd.errors import StateError
from edl_hvd.rescale.ramp import Ramp
from edl_hvd.storage import open_storage
from edl_hvd.worker.codec import decode, encode
from edl_hvd.worker.handlers import Handler, handler_for
from edl_hvd.worker.snapshot import SnapshotBuffers

_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, on Linux


class Memory:
    """The attributes and counters of a ``State`` and the snapshot of their last commit.

    Attributes:
        attributes: Plain attributes by name; the live values.
        handlers: Everything else by name.
        step: Optimizer steps of the whole run.
        epoch: Epochs finished.
        samples: Samples consumed by the whole run.
        ramp: The learning-rate factor.
        commit: Number of the last commit; -1 before this process has held any state.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.handlers: dict[str, Handler] = {}
        self.attributes: dict[str, Any] = {}
        for name, value in attributes.items():
            handler = handler_for(name, value)
            if handler is None:
                self.attributes[name] = value
            else:
                self.handlers[name] = handler
        self.step = self.epoch = self.samples = 0
        self.ramp = Ramp()
        self.commit = -1
        self._snapshot = SnapshotBuffers()
        self._host_buffers: dict[str, torch.Tensor] = {}

    def of_kind(self, kind: type | Callable[[object], bool]) -> Iterable[Any]:
        """The handled objects of a class, or those for which a predicate holds, in the order given."""
        matches = (lambda value: isinstance(value, kind)) if isinstance(kind, type) else kind
        return [handler.value for handler in self.handlers.values() if matches(handler.value)]

    @property
    def held(self) -> int:
        """The commit number that this worker could give to others; -1 if none."""
        return self.commit if self._snapshot.whole else -1

    @property
    def held_step(self) -> int:
        """The optimizer step of that commit; -1 if none."""
        return int(self._snapshot.plain["counters"]["step"]) if self._snapshot.whole else -1

    def take(self, number: int) -> None:
        """Copy the present state into the snapshot, as commit ``number``. All or nothing."""
        counters = {"step": self.step, "epoch": self.epoch, "samples": self.samples, "commit": number,
                    "ramp": self.ramp.as_dict()}  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        for name, handler in self.handlers.items():
            plain[name], parts = encode(handler.capture(), name)
            tensors.update(parts)
        for name, value in self.attributes.items():
            try:
                plain[name], parts = encode(value, name)
            except StateError as error:
                raise StateError(f"state.{name} was set to something that cannot be kept: {error}") from None
            tensors.update(parts)
        self._snapshot.fill(tensors, {"counters": counters, "attributes": plain})
        self.commit = number

    def put_back(self) -> None:
        """Make the snapshot the present state again; does nothing where none was taken."""
        if self._snapshot.whole:
            self._load(self._snapshot.plain, self._snapshot.tensors)

    def share(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The snapshot's plain state and tensors, for the other members."""
        return self._snapshot.plain, self._snapshot.tensors

    def receive(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a snapshot from another member or from storage, as the present state and as the commit."""
        self._load(plain, tensors)
        self.take(self.commit)

    def _load(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        saved = plain["attributes"]
        known = self.handlers.keys() | self.attributes.keys()
        if saved.keys() != known:
            raise StateError(
                f"the saved state has {_names(saved.keys() - known)} that State(…) lacks, and State(…) has "
                f"{_names(known - saved.keys())} that the saved state lacks; give State the same names as when it was "
                "saved"
            )
        for name, handler in self.handlers.items():
            try:
                handler.load(decode(saved[name], tensors))
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateError(f"the saved {name} does not fit the one given to State: {error}") from error
        for name in self.attributes:
            # Through the codec once more: what the script does to its lists must not reach the snapshot.
            self.attributes[name] = _copy(decode(saved[name], tensors))
        counters = plain["counters"]
        self.step, self.epoch, self.samples = counters["step"], counters["epoch"], counters["samples"]
        self.ramp = Ramp(**counters["ramp"])
        self.commit = counters["commit"]

    def for_checkpoint(self) -> Snapshot:
        """The snapshot as a value whose tensors stay as they are until the next call."""
        counters = self._snapshot.plain["counters"]
        return self._snapshot.host_copy(
            self._host_buffers, step=counters["step"], epoch=counters["epoch"], samples=counters["samples"]
        )

    def keep_for_next_life(self) -> str | None:
        """Write the snapshot to files, in memory where it fits; their folder, or ``None`` without a snapshot."""
        if not self._snapshot.whole:
            return None
        size_bytes = sum(tensor.nbytes for tensor in self._snapshot.tensors.values())
        folder = tempfile.mkdtemp(prefix="edl_hvd-", dir=_roomy_folder(size_bytes))
        writer = CheckpointWriter(open_storage(folder), keep=1)
        writer.begin(self._snapshot.host_copy({}, step=self.step, epoch=self.epoch, samples=self.samples), 0, 1, "life")
        writer.wait(timeout_s=600)
        writer.close()
        return folder

    def return_from(self, folder: str) -> None:
        """Take the state of this worker's previous life back."""
        snapshot = restore_newest(open_storage(folder), report=lambda event: None)
        if snapshot is not None:
            self.receive(snapshot.plain, dict(snapshot.tensors))


def _copy(value: Any) -> Any:
    plain, tensors = encode(value, "")
    return decode(plain, {name: tensor.clone() for name, tensor in tensors.items()})


def _roomy_folder(size_bytes: int) -> Path | None:
    """The file system in memory if it takes that much (a container may give it 64 MB), else the default."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size_bytes * 1.1 + (1 << 20):
        return _SHARED_MEMORY
    return None


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
