"""What a training learns in one process alone, with which every job is compared."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prepared
from faults import save_faults
from harness import HERE, Job, environment
from training import Training

# Most jobs end within this number; whoever needs more gets twice what it asks for.
_FEW_EPOCHS = 30


class Reference:
    """The weights of a training after each epoch.

    Trained when they are first asked for, by whichever test process that is; the others find them in the folder.

    Args:
        training: What is trained; what does not change its result is left out.
        folder: Of all references of this run of the tests.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = dataclasses.replace(
            training,
            epochs=0,
            pause_s=0,
            linger_s=0,
            until_size=None,
            leavers_gone=False,
            commit_every=1,
            checkpoint=None,
            loader_workers=0,
        )
        name = json.dumps(dataclasses.asdict(self._training), sort_keys=True)
        self._folder = folder / hashlib.sha256(name.encode()).hexdigest()[:16]

    def weights_after(self, epochs: int) -> dict[str, list[float]]:
        """The network's weights after a number of epochs."""
        path = self._folder / "weights.json"
        with self._locked():
            known = json.loads(path.read_text()) if path.exists() else []
            if len(known) <= epochs:
                known = self._train(max(_FEW_EPOCHS, 2 * epochs))
                path.write_text(json.dumps(known))
        weights: dict[str, list[float]] = known[epochs]
        return weights

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _train(self, epochs: int) -> list[dict[str, Any]]:
        folder = self._folder / f"{epochs}"
        folder.mkdir()
        dataclasses.replace(self._training, epochs=epochs).save(folder)
        save_faults(folder, ())
        script = [sys.executable, str(HERE / "worker_script.py"), str(folder)]
        variables = environment(Job(), folder, uuid.uuid4().hex)
        if "long" in self._training.extra:
            done = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=600, check=False)
            code, text = done.returncode, done.stderr
        else:
            code, text = prepared.run(script, variables, folder)
        if code != 0:
            raise RuntimeError(f"the training alone failed with exit code {code}:\n{text}")
        (report,) = (folder / "reports").glob("*.json")
        learned: list[dict[str, Any]] = json.loads(report.read_text())["weights_by_epoch"]
        return learned
