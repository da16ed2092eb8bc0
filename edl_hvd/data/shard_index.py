"""How many samples each shard has: counted once, and kept in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edl_hvd.errors import UsageError

Shard = TypeVar("Shard")

_FORMAT = 1
_ALL = 2**62


def count_samples(
    shards: Sequence[Shard], read: Callable[[Shard], Iterable[Any]], cache: str | os.PathLike[str] | None = None
) -> list[int]:
    """The number of samples in each shard, for :class:`~edl_hvd.ElasticShards`.

    Any process may call it; not collective. It blocks while it reads the shards that the cache lacks. Of plain tar
    files (:class:`~edl_hvd.TarSamples`) only the headers are read. Call it once before a job of several workers, so
    that they find the cache; otherwise each of them counts.

    Args:
        shards: Shards, as for ``ElasticShards``; ``str(shard)`` names a shard in the cache.
        read: Function that returns an iterable over the samples of a shard, as for ``ElasticShards``.
        cache: Path of a JSON file that keeps the counts; it is made when it is missing, and extended. A shard that is a
            file here is counted again when its size or its modification time has changed; one behind a URL is not.

    Returns:
        One count per shard, each at least 0, in their order.

    Raises:
        UsageError: The cache is something else, or a shard cannot be read.
    """
    path = Path(cache) if cache is not None else None
    known = _load(path) if path is not None and path.exists() else {}
    marks = {str(shard): _mark(shard) for shard in shards}
    missing = [shard for shard in shards if str(shard) not in known or known[str(shard)]["mark"] != marks[str(shard)]]
    try:
        for shard in missing:
            known[str(shard)] = {"samples": _count(read(shard)), "mark": marks[str(shard)]}
    finally:  # what was counted before something went wrong need not be counted again
        if path is not None and missing:
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            part.write_text(json.dumps({"format": _FORMAT, "shards": known}, indent=1), encoding="utf-8")
            part.replace(path)
    return [known[str(shard)]["samples"] for shard in shards]


def _count(samples: Iterable[Any]) -> int:
    iterator = iter(samples)
    skip = getattr(iterator, "skip", None)
    count: int = skip(_ALL) if skip is not None else sum(1 for _ in iterator)
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
    return count


def _mark(shard: Any) -> list[int] | None:
    """What changes when a file does; ``None`` for what is no file here."""
    try:
        found = os.stat(shard)
    except (OSError, TypeError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns]


def _load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}")
        shards: dict[str, dict[str, Any]] = document["shards"]
        return {name: {"samples": int(entry["samples"]), "mark": entry["mark"]} for name, entry in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the file of sample counts {str(path)!r} cannot be used ({type(error).__name__}: {error}); expected one "
            "that count_samples has written. Delete it to have the shards counted again"
        ) from error
