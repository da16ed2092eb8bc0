"""Tensors as a safetensors file and as a file of ``torch.save``, written without torch.

Both are written front to back, or at known places, from one tensor after the other, so that a model need not fit in
memory. A file of ``torch.save`` is a zip archive: ``data.pkl`` names the tensors, ``data/0`` and so on are their
elements. Only writing is done here: nothing in the package reads a pickle.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import BinaryIO

from edl_hvd.checkpoint.format.entries import TensorEntry
from edl_hvd.checkpoint.format.safetensors import ELEMENT_TYPES, write_header

Pieces = Iterator[tuple[str, memoryview]]
# The tensors in any order: the name of each and its elements, or some of them and then the next ones.

_TORCH_ALIGNMENT = 64
_ZIP_LOCAL_HEADER_BYTES, _ZIP_EXTRA_HEADER_BYTES, _ZIP64_EXTRA_BYTES = 30, 4, 20
_PADDING_ID = 0x4246
# What torch itself pads with: an extra field "FB".
_ARCHIVE = "archive"

# The classes of storage that torch had before it had storages without a type.
_STORAGES = {
    "bool": "BoolStorage", "uint8": "ByteStorage", "int8": "CharStorage", "int16": "ShortStorage",
    "int32": "IntStorage", "int64": "LongStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage", "float64": "DoubleStorage", "complex64": "ComplexFloatStorage",
}  # fmt: skip


def write_safetensors(file: BinaryIO, entries: Mapping[str, TensorEntry], pieces: Pieces) -> None:
    """Write the file; readers find the names of ``entries``, in no particular order."""
    header, places = write_header({name: (entry.dtype, entry.shape) for name, entry in entries.items()},
                                  metadata={"format": "pt"})  # fmt: skip
    file.write(header)
    for name, group in groupby(pieces, key=lambda piece: piece[0]):
        file.seek(places[name].start)
        for _, view in group:
            file.write(view)


def write_torch(file: BinaryIO, entries: Mapping[str, TensorEntry], pieces: Pieces) -> None:
    """Write the file; ``torch.load(..., weights_only=True)`` gives a dictionary in the order of ``entries``."""
    numbers = {name: number for number, name in enumerate(entries)}
    with zipfile.ZipFile(file, "w") as archive:
        index = _index(entries, numbers)
        _add(archive, file, "data.pkl", len(index), [index])
        _add(archive, file, "byteorder", 6, [b"little"])
        for name, group in groupby(pieces, key=lambda piece: piece[0]):
            _add(archive, file, f"data/{numbers[name]}", entries[name].size_bytes, (view for _, view in group))
        _add(archive, file, "version", 2, [b"3\n"])


def _add(
    archive: zipfile.ZipFile, file: BinaryIO, name: str, size_bytes: int, data: Iterable[bytes | memoryview]
) -> None:
    """Add a record whose bytes begin at a multiple of 64, so that it can be mapped into memory."""
    record = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
    start = file.tell() + _ZIP_LOCAL_HEADER_BYTES + len(record.filename) + _ZIP_EXTRA_HEADER_BYTES
    if size_bytes * 1.05 > zipfile.ZIP64_LIMIT:
        start += _ZIP64_EXTRA_BYTES
    padding = -start % _TORCH_ALIGNMENT
    record.extra = struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding
    record.file_size = size_bytes
    with archive.open(record, "w") as target:
        for piece in data:
            target.write(piece)


# The index is a pickle, protocol 2; these are the instructions of which it is made.


def _index(entries: Mapping[str, TensorEntry], numbers: Mapping[str, int]) -> bytes:
    pairs = b"".join(_text(name) + _tensor(entry, numbers[name]) for name, entry in entries.items())
    return b"\x80\x02}(" + pairs + b"u."


def _tensor(entry: TensorEntry, number: int) -> bytes:
    """A call that builds the tensor: storage, offset, shape, strides, no gradient, no hooks."""
    count = entry.size_bytes // ELEMENT_TYPES[entry.dtype].size_bytes
    if entry.dtype in _STORAGES:
        function, storage, length, last = "_rebuild_tensor_v2", _name("torch", _STORAGES[entry.dtype]), count, b""
    else:
        function, storage = "_rebuild_tensor_v3", _name("torch.storage", "UntypedStorage")
        length, last = entry.size_bytes, _name("torch", entry.dtype)
    elements = b"(" + _text("storage") + storage + _text(str(number)) + _text("cpu") + _number(length) + b"tQ"
    strides = [1] * len(entry.shape)
    for place in range(len(strides) - 1, 0, -1):
        strides[place - 1] = strides[place] * max(1, entry.shape[place])
    no_hooks = _name("collections", "OrderedDict") + b")R"
    where = elements + _number(0) + _numbers(entry.shape) + _numbers(strides)
    return _name("torch._utils", function) + b"(" + where + b"\x89" + no_hooks + last + b"tR"


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _numbers(numbers: list[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
