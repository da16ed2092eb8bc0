"""What a run of ``trajectory_script.py`` saw and learned, step by step."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import add_host, kill, remove_host, save_faults
from harness import HERE, Job, Outcome, environment, outcome_of
from training import Training

SCRIPT = "trajectory_script.py"
# 1 → 3 → 2 → 4 → 1 workers; from three to two and from four to one by SIGKILL.
FAULTS = (
    add_host("127.0.0.1:1", step=10),
    add_host("127.1:1"),
    kill(worker="127.1:0", size=3, step=40),
    remove_host("127.1", after=2),
    add_host("127.1:2", size=2, step=50),
    *(kill(worker=worker, size=4, step=90) for worker in ("127.0.0.1:0", "127.1:0", "127.1:1")),
    remove_host("127.0.0.1", after=6),
    remove_host("127.1", after=7),
)


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        samples: Indices of its samples, in the order of the micro-batches.
        pixels: Checksum of the images of each micro-batch.
        loss: Mean over all samples.
    """

    samples: tuple[int, ...]
    pixels: tuple[int, ...]
    loss: float


def steps_of(outcome: Outcome) -> list[Step]:
    """The committed history: of a step that was done again, the last time counts."""
    found: dict[int, dict[tuple[int, ...], dict[str, Any]]] = {}
    for line in outcome.lines("loss"):
        found.setdefault(line["step"], {})[tuple(line["samples"])] = line
    order = sorted(found)
    assert order == list(range(len(order))), "a step is missing"
    return [_step(list(found[number].values())) for number in order]


def _step(parts: list[dict[str, Any]]) -> Step:
    parts = sorted(parts, key=lambda part: part["samples"])
    count = sum(len(part["samples"]) for part in parts)
    loss = sum(len(part["samples"]) * part["loss"] for part in parts) / count
    return Step(
        tuple(index for part in parts for index in part["samples"]), tuple(part["pixels"] for part in parts), loss
    )


def run_alone(training: Training, epochs: int, folder: Path) -> Outcome:
    """The same training in one process without a launcher, for a number of epochs."""
    folder.mkdir(parents=True)
    training = dataclasses.replace(training, epochs=epochs, pause_s=0, until_size=None, linger_s=0)
    training.save(folder)
    save_faults(folder, ())
    variables = environment(Job(), folder, uuid.uuid4().hex)
    command = [sys.executable, str(HERE / SCRIPT), str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return outcome_of(folder, done.returncode, 0.0, [])
