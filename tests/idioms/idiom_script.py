"""A worker that runs an idiom's script and saves what it has learned: ``idiom_script.py NAME FOLDER``.

Faults strike before a step ("step") and when its gradient is about to be summed ("reduced"), see ``elastic/faults.py``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "elastic")]

WORKERS = 3
EPOCHS = 8
MICRO_BATCHES = {"batch_norm_statistics": 4}
EXACT = {"batch_norm_statistics"}
# The job must not end before a worker is back whose start takes some seconds.
WAIT_PER_STEP_S = 0.5


def main(name: str, folder: Path) -> None:
    from faults import Points

    from edl_hvd.errors import WorldBrokenError

    points = Points(folder, lambda: WorldBrokenError)
    points.note("start")
    import quick_start  # noqa: F401

    # isort: split
    import torch
    from all_idioms import IDIOMS
    from idioms import Job, flattened

    import edl_hvd

    torch.set_num_threads(1)
    idiom = next(idiom for idiom in IDIOMS if idiom.name == name)

    def place() -> None:
        points.rank, points.size = edl_hvd.rank(), edl_hvd.size()

    def noted(original):
        def steps(self, loader):
            place()
            points.note("enter", rank=points.rank, size=points.size, step=self.step, generation=self.generation)
            for step in original(self, loader):
                points.step = self.step
                points.note("step", rank=points.rank, size=points.size, step=self.step)
                points.reach("step")
                yield step
                if edl_hvd.size() < WORKERS:
                    time.sleep(WAIT_PER_STEP_S)

        return steps

    edl_hvd.State.steps = noted(edl_hvd.State.steps)
    points.around("edl_hvd.worker.training.reduction:Reduction.complete", "reduced")
    outcome = idiom.ours(Job(MICRO_BATCHES.get(name, 3), exact=name in EXACT, epochs=EPOCHS))
    torch.save(dict(flattened(outcome)), folder / f"outcome.{edl_hvd.rank()}.pt")
    points.note("end", rank=edl_hvd.rank(), size=edl_hvd.size())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
