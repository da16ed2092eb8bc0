"""The checksum of everything in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edl_hvd.errors import UsageError

CHUNK_BYTES = 16 * 1024 * 1024
# Elements are checksummed in chunks of this size: small enough to say where the damage is and to be verified while the
# next ones are read, large enough that the checksums of a terabyte are three megabytes of manifest.

_CHECKSUM = re.compile(r"xxh3-128:[0-9a-f]{32}")


def checksum(data: bytes | bytearray | memoryview) -> str:
    """``xxh3-128:`` and 32 hexadecimal digits.

    XXH3 of the xxHash library: 9.4 GB/s of one core, in chunks of 16 MiB from memory, without holding Python's
    lock; CRC-32 of zlib reached 1.8 and BLAKE2b 0.4 (``benchmarks/checksum.py``).
    It finds damage, not forgery; nobody who may write to the storage needs to forge.

    >>> checksum(b"")
    'xxh3-128:99aa06d3014798d86001c324468d497f'

    Raises:
        UsageError: xxhash is not installed.
    """
    # Imported here: the command line starts, and explains itself, where it is not installed.
    try:
        import xxhash
    except ImportError as error:
        raise UsageError("checkpoints need xxhash, which is not installed; run: pip install xxhash") from error
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def chunks(size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each chunk begins and ends; of nothing there are none.

    >>> list(chunks(40, 16))
    [(0, 16), (16, 32), (32, 40)]
    """
    for start in range(0, size_bytes, chunk_bytes):
        yield start, min(start + chunk_bytes, size_bytes)


def is_checksum(text: str) -> bool:
    """Whether a text has the form that ``checksum`` gives."""
    return _CHECKSUM.fullmatch(text) is not None
