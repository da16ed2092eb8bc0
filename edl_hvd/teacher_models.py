"""Which model the teachers of this process have, so that all workers of a job learn from the same one.

The distillation notes the fingerprint of the first teacher that it meets in each place, which is the source of teachers
as the script names it. The workers of a world compare what they have noted; neither knows the other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherModel:
    """Two workers that have met different models in one place.

    Attributes:
        source: Source of the teachers.
        used: Fingerprint of the model that all are to learn from.
        other: Fingerprint of another one that some worker has met.
    """

    source: str
    used: str
    other: str


class TeacherModels:
    """Written by the threads of the distillation and by that of the script.

    Attributes:
        met: Fingerprints by source; replaced as a whole.
        is_new: Whether it has a model that the other workers have not heard of.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agreed: dict[str, str] = {}
        self.met: Mapping[str, str] = {}
        self.is_new = False

    def meet(self, source: str, fingerprint: str) -> None:
        """Note the model of the first teacher of a place; an empty fingerprint says nothing of it."""
        with self._lock:
            if fingerprint and source not in self.met:
                self.met, self.is_new = {**self.met, source: fingerprint}, True

    def agreed(self, source: str) -> str:
        """The fingerprint of the model that all workers learn from in this place; empty if they have not compared."""
        return self._agreed.get(source, "")

    def forget(self) -> None:
        """The training is over; the next one of this process may have teachers with another model."""
        with self._lock:
            self.met, self._agreed, self.is_new = {}, {}, False

    def agree(self, met_by: Sequence[Mapping[str, str]]) -> list[OtherModel]:
        """Choose for each place the model of the first of these workers that has met one.

        >>> models = TeacherModels()
        >>> models.agree([{"file:a": "1"}, {"file:a": "2", "file:b": "3"}])
        [OtherModel(source='file:a', used='1', other='2')]
        >>> models.agreed("file:a"), models.agreed("file:b"), models.is_new
        ('1', '3', False)

        Args:
            met_by: What each worker has met, the same sequence on all of them.
        """
        chosen: dict[str, str] = {}
        others = {}
        for met in met_by:
            for source, fingerprint in met.items():
                if chosen.setdefault(source, fingerprint) != fingerprint:
                    others[source] = OtherModel(source, chosen[source], fingerprint)
        with self._lock:
            self._agreed = chosen
            self.is_new = not self.met.keys() <= chosen.keys()
            self.met = {**self.met, **chosen}
        return list(others.values())


teacher_models = TeacherModels()
"""Those of this process."""
