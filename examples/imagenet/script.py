"""The demo's script: what is done to the hosts, and when. Pure: it reads events and says which scene is due."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Horovod treats the two names of this machine as two hosts.
FIRST, SECOND = "localhost", "127.0.0.1"


@dataclass(frozen=True)
class Scene:
    """One change of the hosts.

    Attributes:
        title: Title on the screen.
        at: Fraction of the run's samples after which it begins, once the scene before it is over.
        action: "add" the host, "kill" its worker and take the host away, or "remove" the host.
        host: Name of the host.
        size: Number of workers when it is over.
    """

    title: str
    at: float
    action: str
    host: str
    size: int


# The killed worker is rank 0 and the only one from the start; the one that leaves is the only one that was present at
# the kill. So the trained weights pass to other workers twice.
SCRIPT = (
    Scene("a second host joins", 0.10, "add", SECOND, 2),
    Scene("the first host's worker is killed with SIGKILL", 0.35, "kill", FIRST, 1),
    Scene("the first host returns", 0.50, "add", FIRST, 2),
    Scene("the second host leaves", 0.75, "remove", SECOND, 1),
)


def shifted(scenes: tuple[Scene, ...], seed: int) -> tuple[Scene, ...]:
    """The same scenes in the same order at other times; seed 0 does not change them.

    >>> [scene.at for scene in shifted(SCRIPT, 0)]
    [0.1, 0.35, 0.5, 0.75]
    """
    dice = random.Random(seed)
    return tuple(replace(scene, at=scene.at + dice.uniform(-0.06, 0.06) * (seed != 0)) for scene in scenes)


class Director:
    """Director that reads the events of a run and says which scene is due.

    A scene begins when training is far enough; it is over when a world of the promised size has trained a step. The
    next one never begins before: on a slow machine the script stretches.

    Args:
        samples: Number of samples of the whole run.
        scenes: Scenes in order.
    """

    def __init__(self, samples: int, scenes: tuple[Scene, ...] = SCRIPT) -> None:
        self.samples_done = 0
        self.size = 0
        self._samples = samples
        self._waiting = list(scenes)
        self._playing: Scene | None = None
        self._generation = 0
        self._began_in = 0

    @property
    def playing(self) -> Scene | None:
        """The scene that has begun and is not over."""
        return self._playing

    @property
    def waiting(self) -> tuple[Scene, ...]:
        """The scenes that have not begun."""
        return tuple(self._waiting)

    def observe(self, line: Mapping[str, Any]) -> None:
        """Read one line of the event log."""
        if line["event"] == "world_formed":
            self._generation, self.size = line["generation"], line["size"]
        elif line["event"] == "commit":
            self.samples_done = line["samples"]
            trained_anew = line["generation"] == self._generation > self._began_in
            if self._playing and trained_anew and self.size == self._playing.size:
                self._playing = None

    def next_scene(self) -> Scene | None:
        """The scene to perform now, returned once; ``None`` while none is due."""
        if self._playing or not self._waiting or self._generation == 0:
            return None
        if self.samples_done < self._waiting[0].at * self._samples:
            return None
        self._playing, self._began_in = self._waiting.pop(0), self._generation
        return self._playing
