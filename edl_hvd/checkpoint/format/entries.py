"""What a manifest says of files and tensors, and how it is read from JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.checkpoint.format import document
from edl_hvd.checkpoint.format.document import show
from edl_hvd.checkpoint.format.object_keys import is_shard_name
from edl_hvd.checkpoint.format.safetensors import ELEMENT_TYPES

RESERVED_NAME = "__metadata__"
# What the safetensors format keeps for itself.

_LONGEST_FILE_NAME = 200

_LIKE_A_PIECE = re.compile(r".*\[rows [0-9]+:[0-9]+\]", re.DOTALL)


@dataclass(frozen=True)
class FileEntry:
    """A shard file.

    Attributes:
        size_bytes: Length of the file.
        header_bytes: Length of its header; all the rest are elements of its tensors.
        header_checksum: Checksum of the header.
        chunk_bytes: Bytes of each tensor's elements that share a checksum.
    """

    size_bytes: int
    header_bytes: int
    header_checksum: str
    chunk_bytes: int


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor: the shard that has them, and the checksum of each chunk of them."""

    file: str
    first_row: int
    rows: int
    checksums: list[str]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: torch's name of its type, its shape, and the pieces of it, its rows in order."""

    dtype: str
    shape: list[int]
    pieces: list[Piece]

    @property
    def rows(self) -> int:
        """Along the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return document.bytes_of_shape(self.shape[1:], ELEMENT_TYPES[self.dtype].size_bytes, "a row")

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Stored:
    """A piece as a tensor of its own, which it is for readers of its file."""

    tensor: str
    dtype: str
    shape: list[int]
    row_bytes: int
    piece: Piece


def stored_name(name: str, first_row: int, rows: int, all_rows: int) -> str:
    """What a piece is called in its file; never what another tensor, or another piece, is called.

    A whole tensor has its own name, unless that looks like a piece's: then it is stored as the piece that it is
    all of. So whatever ends in ``[rows a:b]`` is a piece, and what stands before is its tensor's name.

    >>> stored_name("w", 0, 10, 10), stored_name("w", 5, 5, 10), stored_name("w[rows 5:10]", 0, 3, 3)
    ('w', 'w[rows 5:10]', 'w[rows 5:10][rows 0:3]')
    """
    if rows == all_rows and not _LIKE_A_PIECE.fullmatch(name):
        return name
    return f"{name}[rows {first_row}:{first_row + rows}]"


def stored_by_file(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, Stored]]:
    """What each file holds, by the names there."""
    found: dict[str, dict[str, Stored]] = {}
    for name, entry in tensors.items():
        for piece in entry.pieces:
            shape = [piece.rows, *entry.shape[1:]] if entry.shape else []
            key = stored_name(name, piece.first_row, piece.rows, entry.rows)
            found.setdefault(piece.file, {})[key] = Stored(name, entry.dtype, shape, entry.row_bytes, piece)
    return found


# From JSON; all of this raises ``ValueError`` with what was found, where, and what is expected.


def decode_files(value: object) -> dict[str, FileEntry]:
    entries = document.mapping(value, "'files' of its content")
    for name in entries:
        # Names are joined to a path: only names that the writer gives are believed.
        if not is_shard_name(name) or len(name) > _LONGEST_FILE_NAME:
            raise ValueError(f"it lists unexpected files: {show(name)} is no shard's name")
    return {name: _file(entry, f"file {name!r}") for name, entry in entries.items()}


def _file(value: object, what: str) -> FileEntry:
    entry = document.fields(value, what, ("size_bytes", "header_bytes", "header_checksum", "chunk_bytes"))
    return FileEntry(
        size_bytes=document.whole_number(entry["size_bytes"], f"'size_bytes' of {what}"),
        header_bytes=document.whole_number(entry["header_bytes"], f"'header_bytes' of {what}"),
        header_checksum=document.checksum_text(entry["header_checksum"], f"'header_checksum' of {what}"),
        chunk_bytes=document.whole_number(entry["chunk_bytes"], f"'chunk_bytes' of {what}", least=1),
    )


def decode_tensors(value: object, files: Mapping[str, FileEntry], whole: bool) -> dict[str, TensorEntry]:
    """The tensors, which are just what is in the files.

    Args:
        value: Value from JSON.
        files: Files of the document, by name.
        whole: Whether the pieces of a tensor must be all of it; those that one rank wrote need not.
    """
    entries = document.mapping(value, "'tensors' of its content")
    if RESERVED_NAME in entries:
        raise ValueError(f"tensor {RESERVED_NAME!r} has the one name that no tensor can have")
    tensors = {name: _tensor(entry, f"tensor {show(name)}", files, whole) for name, entry in entries.items()}
    needed_bytes = {name: entry.header_bytes for name, entry in files.items()}
    for entry in tensors.values():
        for piece in entry.pieces:
            needed_bytes[piece.file] += piece.rows * entry.row_bytes
    for name, size_bytes in needed_bytes.items():
        if size_bytes != files[name].size_bytes:
            raise ValueError(
                f"file {name!r} has {files[name].size_bytes} bytes, its header and its tensors need {size_bytes}"
            )
    return tensors


def _tensor(value: object, what: str, files: Mapping[str, FileEntry], whole: bool) -> TensorEntry:
    told = document.fields(value, what, ("dtype", "shape", "pieces"))
    dtype = document.one_of(told["dtype"], f"'dtype' of {what}", ELEMENT_TYPES)
    shape = document.shape(told["shape"], f"'shape' of {what}")
    document.bytes_of_shape(shape, ELEMENT_TYPES[dtype].size_bytes, what)
    if not isinstance(told["pieces"], list):
        raise ValueError(f"'pieces' of {what} is {show(told['pieces'])}; expected a list of objects")
    pieces = [_piece(piece, f"piece {number} of {what}", files) for number, piece in enumerate(told["pieces"], start=1)]
    entry = TensorEntry(dtype, shape, pieces)
    _check_rows(entry, what, whole)
    for number, piece in enumerate(pieces, start=1):
        needed = -(-piece.rows * entry.row_bytes // files[piece.file].chunk_bytes)
        if len(piece.checksums) != needed:
            raise ValueError(
                f"piece {number} of {what} has {len(piece.checksums)} checksums; expected {needed}, one for each "
                f"{files[piece.file].chunk_bytes} bytes"
            )
    return entry


def _piece(value: object, what: str, files: Mapping[str, FileEntry]) -> Piece:
    piece = document.fields(value, what, ("file", "first_row", "rows", "checksums"))
    checksums = piece["checksums"]
    if not isinstance(checksums, list):
        raise ValueError(f"'checksums' of {what} is {show(checksums)}; expected a list")
    return Piece(
        file=document.one_of(piece["file"], f"'file' of {what}", files, "the manifest's files"),
        first_row=document.whole_number(piece["first_row"], f"'first_row' of {what}"),
        rows=document.whole_number(piece["rows"], f"'rows' of {what}"),
        checksums=[document.checksum_text(one, f"one of the 'checksums' of {what}") for one in checksums],
    )


def _check_rows(entry: TensorEntry, what: str, whole: bool) -> None:
    """Each row is in one piece, and if the tensor is to be whole, none is missing."""
    row = 0
    for piece in entry.pieces:
        if piece.first_row != row and (whole or piece.first_row < row):
            raise ValueError(f"a piece of {what} begins at row {piece.first_row}; expected row {row}")
        if piece.rows == 0 and (entry.rows > 0 or len(entry.pieces) > 1):
            raise ValueError(f"a piece of {what} has no rows; expected at least one")
        row = piece.first_row + piece.rows
    if row > entry.rows or (whole and row < entry.rows) or not entry.pieces:
        raise ValueError(f"the pieces of {what} end at row {row}; expected the {entry.rows} of its shape")
