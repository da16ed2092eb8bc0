"""The pieces of tensors in a shard as views of its bytes, verified, where torch may be missing."""

from __future__ import annotations

from collections.abc import Mapping

from edl_hvd.checkpoint.checksum import checksum, chunks
from edl_hvd.checkpoint.decoding import show
from edl_hvd.checkpoint.entries import FileEntry, Stored
from edl_hvd.checkpoint.header import read_header

_MOST_PLACES = 3
# That a message names; a disk that loses a block, or a file that is another one, has many.


def verified_views(data: bytes, file: FileEntry, expected: Mapping[str, Stored]) -> dict[str, memoryview]:
    """The elements of each piece in a shard, row-major, not copied, after one pass over all of its bytes.

    No byte is left out: the header has a checksum, it says of every other byte which tensor it belongs to, these
    are just the pieces expected, and each chunk of each has a checksum.

    Args:
        data: The shard.
        file: What the manifest says of it.
        expected: What the manifest says is in it, by the names there.

    Raises:
        ValueError: It is anything else; names the first places that are damaged.
    """
    if len(data) != file.size_bytes:
        raise ValueError(f"it has {len(data)} bytes instead of {file.size_bytes}")
    whole = memoryview(data)
    if checksum(whole[: file.header_bytes]) != file.header_checksum:
        raise ValueError(f"the checksum of its header (bytes 0:{file.header_bytes}) is not the manifest's")
    header = read_header(data)
    for name in [*expected, *header]:
        if name not in header:
            raise ValueError(f"it lacks {show(name)}, which the manifest lists")
        if name not in expected:
            raise ValueError(f"it has a tensor besides those listed: {show(name)}")
    views, damaged = {}, []
    for name, stored in expected.items():
        found = header[name]
        if (found.dtype, found.shape) != (stored.dtype, stored.shape):
            raise ValueError(
                f"tensor {show(name)} is {found.dtype} {show(found.shape)}; "
                f"the manifest lists {stored.dtype} {show(stored.shape)}"
            )
        views[name] = whole[found.start : found.end]
        spans = chunks(found.end - found.start, file.chunk_bytes)
        for (start, end), right in zip(spans, stored.piece.checksums, strict=True):
            if checksum(views[name][start:end]) != right:
                damaged.append(_place(stored, start, end, found.start))
    if damaged:
        more = f", and {len(damaged) - _MOST_PLACES} more" if len(damaged) > _MOST_PLACES else ""
        raise ValueError(f"the checksum is not the manifest's for {'; '.join(damaged[:_MOST_PLACES])}{more}")
    return views


def _place(stored: Stored, start: int, end: int, begin: int) -> str:
    """Which rows of which tensor, and which bytes of the file, have the bytes from ``start`` to ``end`` of a piece."""
    first = stored.piece.first_row + start // stored.row_bytes
    last = stored.piece.first_row - (-end // stored.row_bytes)
    return f"tensor {show(stored.tensor)} rows {first}:{last} (bytes {begin + start}:{begin + end})"
