"""The checksum of everything in a checkpoint."""

from __future__ import annotations

from edl_hvd.errors import UsageError


def checksum(data: bytes | memoryview) -> str:
    """``xxh3-128:`` and 32 hexadecimal digits.

    XXH3 of the xxHash library: 34 GB/s on one core here, where CRC-32 of zlib reached 7 and BLAKE2b 1.5.
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
