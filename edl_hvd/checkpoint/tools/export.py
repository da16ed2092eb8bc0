"""A model's weights out of a checkpoint, as one file that needs nothing of this package to be read."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edl_hvd.checkpoint.format.entries import Piece, stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.reading.files import Tell, read_listed, read_shard
from edl_hvd.checkpoint.tools.weight_files import Pieces, write_safetensors, write_torch
from edl_hvd.errors import ObjectExistsError, StorageError, UsageError
from edl_hvd.storage import Storage

_WRITERS = {".safetensors": write_safetensors, ".pt": write_torch}
_TENSOR, _MAPPING = "__tensor__", "__mapping__"
# As the state's attributes are written: a tensor by its name, a dictionary with keys that JSON lacks as pairs.


@dataclass(frozen=True)
class Exported:
    """What was written: of which step, from which attribute of the state, how much."""

    path: str
    step: int
    attribute: str
    tensors: int
    size_bytes: int


def export(storage: Storage, out: str, step: int, attribute: str | None, tell: Tell) -> Exported:
    """Write the ``state_dict`` of a module, under its own names, bit for bit. Holds at most two files in memory.

    Args:
        storage: Storage that has the checkpoint.
        out: Name of a file ``.safetensors`` or ``.pt`` that does not exist; appears when it is complete.
        step: Step of the checkpoint.
        attribute: Attribute of the state; may be ``None`` if only one is a module.
        tell: Function that is given the bytes written so far, and all.

    Raises:
        UsageError: The suffix is another, or there is no such attribute, or it could be one of several.
        ObjectExistsError: ``out`` exists.
        CheckpointDamagedError: The checkpoint does not verify.
        StorageError: The storage does not answer, or the file cannot be written.
    """
    path = Path(out).expanduser()
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        raise UsageError(f"cannot export to {out!r}; expected a name that ends in {' or '.join(_WRITERS)}")
    manifest = read_listed(storage, step).manifest
    attribute, names = _choose(manifest, attribute)
    entries = {own: manifest.tensors[name] for own, name in names.items()}
    _write_new(path, lambda file: writer(file, entries, _pieces(storage, manifest, names, tell)))
    return Exported(str(path), step, attribute, len(entries), path.stat().st_size)


def modules_of(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Per attribute of the state that is a ``state_dict`` of tensors: its own names, and those in the checkpoint."""
    attributes = manifest.plain.get("attributes")
    found = {name: _tensor_names(value) for name, value in attributes.items()} if isinstance(attributes, dict) else {}
    return {name: names for name, names in found.items() if names}


def _tensor_names(value: Any) -> dict[str, str]:
    """Empty unless all of it is tensors: an optimizer's groups and a scheduler's numbers are not."""
    if not isinstance(value, dict) or _TENSOR in value:
        return {}
    items = value[_MAPPING] if _MAPPING in value else list(value.items())
    for key, item in items:
        if not isinstance(key, str) or not isinstance(item, dict) or not isinstance(item.get(_TENSOR), str):
            return {}
    return {key: item[_TENSOR] for key, item in items}


def _choose(manifest: Manifest, attribute: str | None) -> tuple[str, dict[str, str]]:
    modules = modules_of(manifest)
    there = ", ".join(sorted(modules)) or "none"
    if attribute is None and len(modules) == 1:
        [attribute] = modules
    if attribute is None:
        raise UsageError(
            f"step {manifest.step} has {len(modules)} attributes that are a module's state_dict ({there}); "
            + ("name one with --prefix" if modules else "only those can be exported")
        )
    if attribute not in modules:
        raise UsageError(
            f"step {manifest.step} has no attribute {attribute!r} that is a module's state_dict; there are: {there}"
        )
    names = modules[attribute]
    missing = sorted(own for own, name in names.items() if name not in manifest.tensors)
    if missing:
        raise StorageError(f"the manifest of step {manifest.step} lists no tensor for {attribute}: {missing[0]}")
    return attribute, names


def _pieces(storage: Storage, manifest: Manifest, names: Mapping[str, str], tell: Tell) -> Pieces:
    """The tensors, file by file; then those in several pieces, for each of which its files are read again."""
    own = {name: own for own, name in names.items()}
    pieces = {name: manifest.tensors[name].pieces for name in own}
    files = _Files(storage, manifest)
    all_bytes = sum(manifest.tensors[name].size_bytes for name in own)
    done_bytes = 0
    for name in sorted(own, key=lambda name: (len(pieces[name]) > 1, [piece.file for piece in pieces[name]], name)):
        for piece in pieces[name]:
            view = files.view(name, piece)
            yield own[name], view
            done_bytes += view.nbytes
            tell(done_bytes, all_bytes)


class _Files:
    """The verified files of a checkpoint; keeps the one that was read last."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self._stored = stored_by_file(manifest.tensors)
        self._file = ""
        self._views: dict[tuple[str, int], memoryview] = {}

    def view(self, tensor: str, piece: Piece) -> memoryview:
        """The elements of a piece."""
        if piece.file != self._file:
            self._file, self._views = "", {}
            shard = read_shard(self._storage, self._manifest, piece.file, self._stored[piece.file])
            self._views = {(stored.tensor, stored.piece.first_row): view for stored, view in shard.pieces}
            self._file = piece.file
        return self._views[tensor, piece.first_row]


def _write_new(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Give a file its name when it is complete, and only if nothing has that name."""
    if path.exists():
        raise ObjectExistsError(f"cannot export to {path}: it exists and was left as it is")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        try:
            with open(partial, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ObjectExistsError(f"cannot export to {path}: it exists and was left as it is") from error
    except StorageError:
        raise  # Of the storage that is read; an OSError too.
    except OSError as error:
        raise StorageError(f"cannot export to {path}: {error.strerror or error}") from error
