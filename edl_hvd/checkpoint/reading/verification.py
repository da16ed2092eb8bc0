"""The pieces of tensors in a shard as views of its bytes, verified, where torch may be missing."""

from __future__ import annotations

from collections.abc import Mapping

from edl_hvd.checkpoint.format.checksum import checksum, chunks
from edl_hvd.checkpoint.format.document import show
from edl_hvd.checkpoint.format.entries import FileEntry, Stored
from edl_hvd.checkpoint.format.safetensors import HeaderEntry, read_header

_MOST_PLACES = 3
# That a message names; a disk that loses a block, or a file that is another one, has many.


def verified_views(data: bytes, file: FileEntry, expected: Mapping[str, Stored]) -> dict[str, memoryview]:
    """The elements of each piece in a shard, row-major, not copied, after one pass over all of its bytes.

    No byte is left out: the header has a checksum, it says of every other byte which tensor it belongs to, these
    are just the pieces expected, and each chunk of each has a checksum.

    Args:
        data: Bytes of the shard.
        file: Entry of the manifest for it.
        expected: Pieces that the manifest lists for it, by their names there.

    Raises:
        ValueError: It is anything else; names the first places that are damaged.
    """
    if len(data) != file.size_bytes:
        raise ValueError(f"it has {len(data)} bytes instead of {file.size_bytes}")
    whole = memoryview(data)
    header = verified_header(whole, file, expected)
    views, damaged = {}, []
    for name, stored in expected.items():
        views[name] = whole[header[name].start : header[name].end]
        damaged += damaged_chunks(views[name], stored, 0, file.chunk_bytes, header[name].start)
    raise_damaged(damaged)
    return views


def verified_header(
    data: bytes | bytearray | memoryview, file: FileEntry, expected: Mapping[str, Stored]
) -> dict[str, HeaderEntry]:
    """Where in a shard each piece is.

    Args:
        data: Bytes of the shard, or its beginning with all of the header.
        file: Entry of the manifest for it.
        expected: Pieces that the manifest lists for it, by their names there.

    Raises:
        ValueError: It is not the header of just that.
    """
    if checksum(memoryview(data)[: file.header_bytes]) != file.header_checksum:
        raise ValueError(f"the checksum of its header (bytes 0:{file.header_bytes}) is not the manifest's")
    header = read_header(data, file.size_bytes)
    for name in [*expected, *header]:
        if name not in header:
            raise ValueError(f"it lacks {show(name)}, which the manifest lists")
        if name not in expected:
            raise ValueError(f"it has a tensor besides those listed: {show(name)}")
    for name, stored in expected.items():
        found = header[name]
        if (found.dtype, found.shape) != (stored.dtype, stored.shape):
            raise ValueError(
                f"tensor {show(name)} is {found.dtype} {show(found.shape)}; "
                f"the manifest lists {stored.dtype} {show(stored.shape)}"
            )
    return header


def damaged_chunks(elements: memoryview, stored: Stored, first_byte: int, chunk_bytes: int, begin: int) -> list[str]:
    """Places whose checksum is not the manifest's.

    Args:
        elements: Elements of whole chunks of the piece.
        stored: Piece that they belong to.
        first_byte: Place of their first byte among the piece's, where a chunk begins.
        chunk_bytes: Length of a chunk.
        begin: Place in the file where the piece's elements begin.
    """
    right = stored.piece.checksums[first_byte // chunk_bytes :]
    return [
        _place(stored, first_byte + start, first_byte + end, begin)
        for (start, end), expected in zip(chunks(elements.nbytes, chunk_bytes), right, strict=False)
        if checksum(elements[start:end]) != expected
    ]


def raise_damaged(places: list[str]) -> None:
    """Raises ``ValueError`` with the first of them, if there are any."""
    if places:
        more = f", and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        raise ValueError(f"the checksum is not the manifest's for {'; '.join(places[:_MOST_PLACES])}{more}")


def _place(stored: Stored, start: int, end: int, begin: int) -> str:
    """Which rows of which tensor, and which bytes of the file, have the bytes from ``start`` to ``end`` of a piece."""
    first = stored.piece.first_row + start // stored.row_bytes
    last = stored.piece.first_row - (-end // stored.row_bytes)
    return f"tensor {show(stored.tensor)} rows {first}:{last} (bytes {begin + start}:{begin + end})"
