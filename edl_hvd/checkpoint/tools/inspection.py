"""What is listed at a URL, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.reading.catalog import Catalog, listed_key, read_catalog
from edl_hvd.checkpoint.reading.files import Tell, UnreadableError, check_shard, missing_or_short, read_listed_key
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError
from edl_hvd.storage import Storage


@dataclass(frozen=True)
class Overview:
    """A listed checkpoint at a look: ``problem`` is empty if its manifest is whole and its files have their length."""

    step: int
    manifest: Manifest | None
    problem: str

    @property
    def intact(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Verified:
    """A checkpoint of which every byte was read; ``damaged`` has a reason per damaged file, by its key."""

    step: int
    size_bytes: int
    damaged: dict[str, str]


def overviews(storage: Storage) -> Iterator[Overview]:
    """Each listed checkpoint, newest first; reads the manifests only.

    Raises:
        StorageError: The storage does not answer.
    """
    catalog = read_catalog(storage)
    for step in catalog.manifests:
        overview = look(storage, catalog, step)
        if overview is not None:
            yield overview


def look(storage: Storage, catalog: Catalog, step: int) -> Overview | None:
    """A checkpoint that is listed; ``None`` if retention has removed it since."""
    try:
        manifest = read_listed_key(storage, step, catalog.manifests[step]).manifest
    except ObjectMissingError:
        return None
    except (CheckpointDamagedError, UnreadableError) as error:
        return Overview(step, None, str(error))
    return Overview(step, manifest, next(iter(missing_or_short(manifest, catalog.objects).values()), ""))


def verify_each(storage: Storage, steps: Iterable[int], tell: Tell) -> Iterator[Verified]:
    """Read every byte of each; one that retention removes meanwhile is left out.

    Raises:
        StorageError: The storage does not answer.
    """
    for step in steps:
        with suppress(ObjectMissingError):
            yield verify(storage, step, tell)


def verify(storage: Storage, step: int, tell: Tell) -> Verified:
    """Read every byte of a checkpoint; takes 16 MiB of memory.

    Args:
        storage: Storage that has it.
        step: Step of the checkpoint.
        tell: Function that is given the bytes read so far, and all.

    Raises:
        ObjectMissingError: No checkpoint of that step is listed.
        StorageError: The storage does not answer.
    """
    key = listed_key(storage, step)
    try:
        manifest = read_listed_key(storage, step, key).manifest
    except (CheckpointDamagedError, UnreadableError) as error:
        return Verified(step, 0, {key: str(error)})
    stored = stored_by_file(manifest.tensors)
    damaged, done_bytes = {}, 0
    for name, entry in manifest.files.items():
        try:
            check_shard(storage, manifest, name, stored.get(name, {}))
        except CheckpointDamagedError as error:
            damaged[object_keys.folder(step) + name] = str(error)
        done_bytes += entry.size_bytes
        tell(done_bytes, manifest.size_bytes)
    return Verified(step, manifest.size_bytes, damaged)
