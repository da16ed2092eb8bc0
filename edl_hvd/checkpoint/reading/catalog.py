"""Which checkpoints are listed: of each step the manifest that counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edl_hvd.checkpoint import layout, ownership
from edl_hvd.checkpoint.ownership import EVERYTHING, Rule
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
        counting = {step: list(filter(rule.counts, keys)) for step, keys in layout.manifests(objects).items()}
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
    objects = storage.list(layout.ROOT if step is None else layout.folder(step))
    return Catalog.of(objects, ownership.rule(storage))  # in this order
