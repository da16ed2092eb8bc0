"""Trains a little, and after each epoch evaluates a model that does not learn: every world has to find the same.

Runs under any launcher and without one. Two metrics count how often each sample was counted. With ``extra=("late",)``
that of the training counts nothing in the first two epochs.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faults import Points
from training import Training, build, loss_of

SAMPLES, BATCH_SIZE, CLASSES = 245, 4, 3
# A rank has the last batch to itself, and it is a single sample.


def main(folder: Path) -> None:
    from edl_hvd.errors import WorldBrokenError

    faulthandler.register(signal.SIGUSR1)
    points = Points(folder, lambda: WorldBrokenError)
    points.note("start")

    import quick_start  # noqa: F401

    # isort: split
    import torch

    import edl_hvd
    from edl_hvd.metrics import AUC, Accuracy, Max, Mean, Metric, Min, Sum
    from edl_hvd.metrics.tally import Layout, Tally

    class Seen(Metric):
        """How often each sample was counted."""

        layout = Layout(sums=SAMPLES)

        def update(self, index: torch.Tensor) -> None:
            self._count(Tally(torch.bincount(index, minlength=SAMPLES), torch.empty(0, dtype=torch.float64)))

        def compute(self) -> list[int]:
            return self._counted().sums.tolist()

    training = Training.load(folder)
    edl_hvd.init()
    model, optimizer, dataset = build(training, ledger_rate=training.global_batch)
    optimizer = edl_hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    judge = torch.nn.Linear(8, CLASSES)
    generator = torch.Generator().manual_seed(3)
    validation = torch.utils.data.TensorDataset(
        torch.arange(SAMPLES), torch.randn(SAMPLES, 8, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )  # fmt: skip
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=training.global_batch, micro_batch=2)
    val_batches = edl_hvd.EvaluationSampler(SAMPLES, batch_size=BATCH_SIZE)
    workers = training.loader_workers
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=workers)
    val_loader = torch.utils.data.DataLoader(validation, batch_sampler=val_batches, num_workers=workers)
    found = {
        "top1": Accuracy(), "top2": Accuracy(top_k=2), "loss": Mean(), "sum": Sum(), "max": Max(), "min": Min(),
        "auc": AUC(), "seen": Seen(),
    }  # fmt: skip
    state = edl_hvd.State(
        model=model, optimizer=optimizer, judge=judge, batches=batches, val_batches=val_batches, trained=Seen(),
        results={}, **found,
    )  # fmt: skip
    if points.launched:
        _install(points)

    @edl_hvd.elastic(checkpoint=training.checkpoint, commit_every=training.commit_every)
    def train(state: Any) -> None:
        points.rank, points.size, points.step = edl_hvd.rank(), edl_hvd.size(), state.step
        at = {"step": state.step, "offset": val_batches.offset, "finished": val_batches.finished}
        points.note("enter", rank=points.rank, size=points.size, generation=state.generation, **at)
        for epoch in state.epochs(10**6):
            mine = epoch >= training.epochs and batches.offset == 0 and points.over(training.linger_s)
            if edl_hvd.allreduce(torch.tensor(int(mine)), op="min").item():
                return
            for batch in state.batches(loader):
                points.step = state.step
                points.note("step", step=state.step, rank=points.rank, size=points.size)
                points.reach("step")
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                points.reach("reduced")
                optimizer.step()
                if "late" not in training.extra or epoch >= 2:
                    state.trained.update(batch[0])
                points.reach("update")
                time.sleep(training.pause_s)
            for index, features, target in state.evaluate(val_loader):
                points.note("evaluate", step=state.step, samples=index.tolist(), size=points.size)
                points.reach("evaluate")
                with torch.no_grad():
                    scores = judge(features)
                    losses = torch.nn.functional.cross_entropy(scores, target, reduction="none")
                state.top1.update(scores, target)
                state.top2.update(scores, target)
                state.loss.update(losses.mean(), weight=len(losses))
                state.sum.update(scores)
                state.max.update(scores)
                state.min.update(scores)
                state.auc.update(scores[:, 0], target == 0)
                state.seen.update(index)
                waits = points.size < (training.until_size or 0) and (folder / "fired" / "0.0").exists()
                time.sleep(1.0 if waits else training.pause_s)
            state.results[str(epoch)] = {
                **{name: metric.compute() for name, metric in found.items()}, "trained": state.trained.compute()
            }  # fmt: skip
            points.reach("evaluated")

    train(state)
    report = {"rank": edl_hvd.rank(), "size": edl_hvd.size(), "step": state.step, "epoch": state.epoch,
              "results": state.results}  # fmt: skip
    (folder / "reports").mkdir(exist_ok=True)
    (folder / "reports" / f"{points.worker.replace(':', '.')}.json").write_text(json.dumps(report))


def _install(points: Points) -> None:
    synced = "edl_hvd.worker.training.metric_sync:sync_metrics"
    points.around(synced, "pool", prepare=lambda: points.note("pool", step=points.step))
    points.around("edl_hvd.worker.commits.snapshot:SnapshotBuffers.fill", "commit")
    points.around("edl_hvd.worker.commit_protocol:CommitProtocol.agree", "committed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
