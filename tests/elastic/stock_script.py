"""The training of ``training.py`` on stock elastic Horovod, as its documentation writes it."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faults import Points
from training import Training, build, loss_of, write_report


def _broken() -> type[Exception]:
    from horovod.common.exceptions import HorovodInternalError

    return HorovodInternalError


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    points = Points(folder, _broken)
    points.note("start")
    points.reach("start")

    training = Training.load(folder)
    if "long" not in training.extra:
        import quick_start  # noqa: F401

    # isort: split
    import horovod.torch as hvd
    import torch

    points.reach("rendezvous")
    hvd.init()
    model, optimizer, dataset = build(training, ledger_rate=1.0)
    batch_size = training.worker_batch or training.global_batch // 2  # fixed: old and new workers must agree on it
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=[(n, p) for n, p in model.named_parameters() if p.requires_grad]
    )
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler, num_workers=training.loader_workers)
    kept: dict[str, Any] = {}
    scheduler = None
    if "scheduler" in training.extra:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        kept["scheduler"] = scheduler
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, seen=[], notes={"last": -1}, **kept
    )
    _install(points, state)

    @hvd.elastic.run
    def train(state: Any) -> None:
        points.rank, points.size, points.step = hvd.rank(), hvd.size(), state.step
        points.note("enter", rank=points.rank, size=points.size, step=state.step)
        while state.epoch < training.epochs or sampler.processed_num or not _agreed_over(points, training):
            for number, batch in enumerate(loader):
                points.step = state.step
                points.note("step", step=state.step, rank=points.rank, size=points.size, lr=_rate(optimizer))
                points.reach("step")
                optimizer.zero_grad()
                # Entries fall by one whatever the world size: the mean over ranks of batch-size times size times mean.
                loss_of(model, batch, ledger_scale=len(batch[0]) * hvd.size()).backward()
                optimizer.step()
                state.step += 1
                points.step = state.step
                if "long" not in training.extra:
                    state.seen.append(state.step)
                state.notes["last"] = state.step
                points.reach("update")
                sampler.record_batch(number, len(batch[0]))
                time.sleep(training.pause_s)
                if state.step % training.commit_every == 0:
                    state.commit()
                elif "check" in training.extra:
                    state.check_host_updates()
            if scheduler is not None:
                state.scheduler.step()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    points.reach("end")
    points.note("end", step=state.step)
    write_report(
        folder, points.worker, model, rank=hvd.rank(), size=hvd.size(), step=state.step, epoch=state.epoch,
        seen=state.seen, notes=state.notes, lr=_rate(optimizer),
    )  # fmt: skip


def _agreed_over(points: Points, training: Training) -> bool:
    """Whether all workers think that the job is over."""
    import horovod.torch as hvd
    import torch

    left = not training.leavers_gone or points.leavers_are_gone()
    mine = points.over(training.linger_s) and training.until_size in (None, points.size) and left
    return bool(hvd.allreduce(torch.tensor(int(mine)), op=hvd.Min, name="over").item())


def _rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _install(points: Points, state: Any) -> None:
    """Tie the points to Horovod's own functions."""
    import horovod.torch as hvd

    def where() -> None:
        points.rank, points.size = hvd.rank(), hvd.size()

    original_sync = state.sync

    def sync() -> None:
        where()
        original_sync()

    state.sync = sync
    points.around("horovod.torch.elastic.state:broadcast_optimizer_state", "sync")
    points.around("horovod.torch.elastic.state:OptimizerStateHandler.save", "commit")
    points.around("horovod.torch.elastic:init", "rendezvous")

    def callback() -> None:
        where()
        points.reach("callback")

    state.register_reset_callbacks([callback])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
