"""A checkpoint from one storage to another, or into a folder of its own: verified, and visible only when whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edl_hvd.checkpoint import lease
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import Stored, stored_by_file
from edl_hvd.checkpoint.reading.catalog import read_catalog
from edl_hvd.checkpoint.reading.files import Listed, Tell, UnreadableError, read_listed, read_shard
from edl_hvd.errors import CheckpointDamagedError, ObjectExistsError, ObjectMissingError, UsageError
from edl_hvd.storage import Storage, open_storage
from edl_hvd.storage.base import RESERVED_FOLDER


@dataclass(frozen=True)
class Copied:
    """What came of one checkpoint: ``problem`` says why it is not at the target; empty if it is."""

    step: int
    was_there: bool
    problem: str


def copy_each(source: Storage, target: Storage, steps: Iterable[int], tell: Tell) -> Iterator[Copied]:
    """Copy several, the oldest first, as a job writes them.

    One that is damaged, gone, or not to be had without replacing another does not keep the others from being copied.

    Raises:
        StorageError: One of the storages does not answer.
    """
    for step in sorted(steps):
        try:
            yield Copied(step, not copy(source, target, step, tell), "")
        except (CheckpointDamagedError, UnreadableError, ObjectExistsError, ObjectMissingError) as error:
            yield Copied(step, False, str(error))


def copy(source: Storage, target: Storage, step: int, tell: Tell) -> bool:
    """Copy one checkpoint; whether it was not there before. Holds one file in memory at a time, or two of
    the same name where the target has one already.

    The manifest comes last, so a copy that ends in the middle is not listed, and can be begun again. Nothing of
    the target is replaced.

    Args:
        source: Storage that has it.
        target: Storage that it is copied to.
        step: Step of the checkpoint.
        tell: Function that is given the bytes copied so far, and all.

    Raises:
        ObjectMissingError: The source lists no such checkpoint.
        CheckpointDamagedError: It does not verify.
        ObjectExistsError: The target has a different one of that step, or a file of that name.
        StorageError: One of the storages does not answer.
    """
    listed = read_listed(source, step)
    # Of the target's present owner, if it has one: those of others do not count there.
    key = read_catalog(target, step).manifests.get(step) or object_keys.manifest_key(step, lease.newest_owner(target))
    existing = _read(target, key)
    _refuse_if_different(existing, listed, target)
    stored = stored_by_file(listed.manifest.tensors)
    done_bytes = 0
    for name, entry in listed.manifest.files.items():
        _copy_file(source, target, listed, name, stored.get(name, {}))
        done_bytes += entry.size_bytes
        tell(done_bytes, listed.manifest.size_bytes)
    if existing is not None:
        return False
    try:
        target.write_new(key, listed.data)
    except ObjectExistsError:
        # Somebody else came first, perhaps with the same one.
        _refuse_if_different(_read(target, key), listed, target)
    return True


def restore_to(source: Storage, folder: str, step: int, tell: Tell) -> str:
    """Copy one checkpoint into a local folder that is new or empty; the folder's URL, for a job or for ``copy``.

    When that fails, the folder is left as empty as it was.

    Raises:
        UsageError: ``folder`` is a URL.
        ObjectExistsError: There is something in the folder already.
        StorageError: As from ``copy``.
    """
    if "://" in folder:
        raise UsageError(f"cannot restore to {folder!r}; expected a local folder ('copy' takes any URL)")
    path = Path(folder).expanduser().absolute()
    if path.exists() and not (path.is_dir() and {entry.name for entry in path.iterdir()} <= {RESERVED_FOLDER}):
        raise ObjectExistsError(f"cannot restore to {path}: it is not an empty folder; name a new one")
    target = open_storage(str(path))
    try:
        copy(source, target, step, tell)
    except BaseException:
        for entry in target.list(object_keys.folder(step)):
            target.delete(entry.key)
        raise
    return target.url


def _copy_file(source: Storage, target: Storage, listed: Listed, name: str, expected: Mapping[str, Stored]) -> None:
    data = read_shard(source, listed.manifest, name, expected).data
    key = object_keys.folder(listed.manifest.step) + name
    try:
        target.write_new(key, data)
    except ObjectExistsError as error:
        # From a copy that was broken off, or of another attempt at this step.
        if _read(target, key) != data:
            raise ObjectExistsError(
                f"cannot copy to {key} in {target.url}: it exists with other contents and was left as it is; copy to "
                "another place, or remove it"
            ) from error


def _refuse_if_different(existing: bytes | None, listed: Listed, target: Storage) -> None:
    if existing is not None and existing != listed.data:
        raise ObjectExistsError(
            f"{target.url} has a different checkpoint of step {listed.manifest.step}, which was left as it is; copy to "
            "another place, or remove it"
        )


def _read(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key)
    except ObjectMissingError:
        return None
