"""Which checkpoints are listed: of each step the manifest that counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edl_hvd.checkpoint import lease
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.lease import EVERYTHING, Rule
from edl_hvd.errors import ObjectMissingError
from edl_hvd.storage import Storage, StoredObject


@dataclass(frozen=True)
class Catalog:
    """A listing, looked through.

    Attributes:
        objects: All objects of the checkpoints.
        manifests: Key of the manifest by step, newest step first. A manifest of a former owner that its successor
            did not find is not among them, and of two at one step the later owner's is.
    """

    objects: list[StoredObject]
    manifests: dict[int, str]

    @classmethod
    def of(cls, objects: Iterable[StoredObject], rule: Rule = EVERYTHING) -> Catalog:
        objects = list(objects)
        counting = {step: list(filter(rule.counts, keys)) for step, keys in object_keys.manifests(objects).items()}
        return cls(objects, {step: keys[0] for step, keys in counting.items() if keys})

    @property
    def steps(self) -> list[int]:
        """The steps of the listed checkpoints, newest first."""
        return list(self.manifests)


def read_catalog(storage: Storage, step: int | None = None) -> Catalog:
    """What is listed, or what is at one step.

    Raises:
        StorageError: The storage does not answer.
    """
    objects = storage.list(object_keys.ROOT if step is None else object_keys.folder(step))
    return Catalog.of(objects, lease.rule(storage))  # in this order


def chosen_steps(storage: Storage, step: int | None, every: bool = False) -> list[int]:
    """Steps that are meant, newest first: every listed one, or this one, or the newest.

    Raises:
        ObjectMissingError: None is listed, or not this one; then the message names those there are.
    """
    listed = read_catalog(storage).steps
    if not listed:
        raise ObjectMissingError(f"no checkpoint is listed in {storage.url}; expected the URL that a job was given")
    if every or step is None:
        return listed if every else listed[:1]
    if step not in listed:
        there = ", ".join(map(str, listed))
        raise ObjectMissingError(f"no checkpoint of step {step} is listed in {storage.url}; those there are: {there}")
    return [step]


def listed_key(storage: Storage, step: int) -> str:
    """Where the manifest of ``step`` is, or would be.

    Raises:
        ObjectMissingError: There are only manifests that do not count.
        StorageError: The storage does not answer.
    """
    catalog = read_catalog(storage, step)
    if step not in catalog.manifests and (others := object_keys.manifests(catalog.objects).get(step)):
        raise ObjectMissingError(
            f"no checkpoint of step {step} is listed in {storage.url}: {others[0]} was written by a job after another "
            "had taken over from it"
        )
    return catalog.manifests.get(step, object_keys.manifest_key(step))
