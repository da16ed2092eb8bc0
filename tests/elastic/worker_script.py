"""The training of ``training.py`` as a user of ``edl_hvd`` writes it; runs under any launcher and without one."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from faults import Points
from sharded import open_shards
from teacher_work import checked, with_teachers
from training import Training, build, loss_of, weights_of, write_report

TABLE_NUMBERS = 25_000_000


def _broken() -> type[Exception]:
    from edl_hvd.errors import WorldBrokenError

    return WorldBrokenError


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    points = Points(folder, _broken)
    points.note("start")
    points.reach("start")

    training = Training.load(folder)
    if "own_sigterm" in training.extra:
        came = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: came.set())
        if points.reach("handles"):
            came.wait()
            points.reach("signalled")
    if training.device == "cuda":
        # All hosts are one machine; NCCL takes each worker for a host of its own.
        os.environ["NCCL_HOSTID"] = points.worker
    elif "long" not in training.extra:
        import quick_start  # noqa: F401

    # isort: split
    import torch
    from pinning import Pinned

    import edl_hvd

    if "notices" in training.extra:  # all hosts are one machine, and only one of them is about to go
        os.environ["EDL_HVD_NOTICES"] = "ec2" if points.worker.startswith("127.0.0.1") else "off"
    edl_hvd.init()
    if points.launched:
        _install(points)
    model, optimizer, dataset = build(training, ledger_rate=training.worker_batch or training.global_batch)
    model.to(training.device)
    optimizer = edl_hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    policy: Any
    if training.most:
        policy = edl_hvd.WorkerBatch("auto", training.rule, min=training.worker_batch, max=training.most)
    elif training.worker_batch:
        policy = edl_hvd.WorkerBatch(training.worker_batch, training.rule)
    else:
        policy = edl_hvd.GlobalBatch(training.global_batch, training.micro_batch)
    if "shards" in training.extra:
        dataset = open_shards(folder, dataset)
        batches = dataset.sampler(policy=policy, seed=0, interleave=2)
    else:
        batches = edl_hvd.ElasticBatchSampler(len(dataset), policy=policy, seed=0)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=training.loader_workers,
        persistent_workers="shards" in training.extra and training.loader_workers > 0,
        pin_memory="pinned" in training.extra,
    )
    if "distill" in training.extra:
        loader = with_teachers(loader, points)
    pinned = Pinned()
    if "pinned" in training.extra:
        pinned.pretend()
    kept: dict[str, Any] = {}
    if "scheduler" in training.extra:
        kept["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if training.ballast_mb:
        kept["ballast"] = torch.nn.Embedding(training.ballast_mb * 256, 1024).requires_grad_(False)
    if "table" in training.extra:
        kept["table"] = torch.zeros(TABLE_NUMBERS)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, seen=[], notes={"last": -1}, **kept)
    weights_by_epoch: list[dict[str, list[float]]] = []

    def resized() -> None:
        points.rank, points.size, points.step = edl_hvd.rank(), edl_hvd.size(), state.step
        points.note("callback", step=state.step, size=points.size)
        points.reach("callback")

    state.on_resize(resized)

    @edl_hvd.elastic(
        checkpoint=training.checkpoint, checkpoint_every=training.checkpoint_every, commit_every=training.commit_every
    )
    def train(state: Any) -> None:
        points.rank, points.size, points.step = edl_hvd.rank(), edl_hvd.size(), state.step
        points.note("enter", rank=points.rank, size=points.size, step=state.step, generation=state.generation)
        entered_at = state.step
        for epoch in state.epochs(10**6):
            if not points.launched:
                weights_by_epoch.append(weights_of(model))
            may_end = epoch >= training.epochs and batches.offset == 0
            if may_end and _agreed_over(points, training, stepped=state.step > entered_at):
                return
            for batch in state.batches(loader):
                if "distill" in training.extra:
                    batch = checked(batch)
                points.step = state.step
                rate = optimizer.param_groups[0]["lr"]
                full = batches.global_batch(points.size)
                points.note("step", step=state.step, rank=points.rank, size=points.size, lr=rate, full=full)
                points.reach("step")
                if batches.offset:
                    points.reach("inside an epoch")
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                points.reach("reduced")
                optimizer.step()
                if "clip" in training.extra and optimizer.at_boundary:
                    for parameter in model.network.parameters():
                        parameter.data.clamp_(-0.2, 0.2)
                points.reach("update")
                if "metric" in training.extra and optimizer.at_boundary:
                    edl_hvd.allreduce(loss.detach(), op="mean")
                if optimizer.at_boundary:
                    if "long" not in training.extra:
                        state.seen.append(state.step + 1)
                    state.notes["last"] = state.step + 1
                    if "table" in training.extra:
                        state.table += 1
                    time.sleep(training.pause_s)
            if "scheduler" in training.extra:
                state.scheduler.step()

    train(state)
    points.reach("end")
    points.note("end", step=state.step)
    if "table" in training.extra:
        assert (state.table == state.step).all(), "the table is not that of the last step"
    write_report(
        folder,
        points.worker,
        model,
        rank=edl_hvd.rank(),
        size=edl_hvd.size(),
        step=state.step,
        epoch=state.epoch,
        samples=state.samples,
        seen=state.seen,
        notes=state.notes,
        lr=optimizer.param_groups[0]["lr"],
        weights_by_epoch=weights_by_epoch,
        scale_invariant_steps=state.scale_invariant_steps,
        noise=state.gradient_noise_scale,
        pinned=pinned.count,
    )


def _agreed_over(points: Points, training: Training, stepped: bool) -> bool:
    """Whether all workers think that the job is over; a size that is waited for has to have made a step, too."""
    import torch

    import edl_hvd

    reached = training.until_size is None or (training.until_size == points.size and stepped)
    left = not training.leavers_gone or points.leavers_are_gone()
    mine = points.over(training.linger_s) and reached and left
    return bool(edl_hvd.allreduce(torch.tensor(int(mine)), op="min").item())


def _install(points: Points) -> None:
    """Tie the points to the functions behind them."""

    import edl_hvd

    def place() -> None:
        points.rank, points.size = edl_hvd.rank(), edl_hvd.size()

    points.around("edl_hvd.worker.joining.horovod_rendezvous:HorovodRendezvous._join_barrier", "rendezvous")
    points.around("horovod.torch:init", "forming")
    points.around("horovod.torch:poll", "waiting")
    points.around("edl_hvd.worker.joining.horovod_rendezvous:HorovodRendezvous.leave", "leaving")
    points.around("edl_hvd.worker.joining.driver_rendezvous:DriverRendezvous._next_world", "ready")
    points.around("edl_hvd.worker.joining.driver_rendezvous:DriverRendezvous._enter", "rendezvous")
    points.around("edl_hvd.worker.joining.driver_rendezvous:DriverRendezvous.leave", "leaving")
    points.around("edl_hvd.worker.standby.replica:StandbyReplica.apply_next", "following")
    points.around(
        "edl_hvd.worker.commits.state_store:StateStore.apply_delta", "followed", prepare=lambda: points.note("followed")
    )
    points.around("horovod.torch:shutdown", "shutdown")
    points.around("edl_hvd.worker.state_agreement:StateAgreement._synchronise", "sync", prepare=place)
    points.around("edl_hvd.worker.engine.horovod_collectives:HorovodCollectives.broadcast_", "broadcast", prepare=place)
    points.around("edl_hvd.worker.commits.snapshot:SnapshotBuffers.fill", "commit")
    points.around("edl_hvd.worker.commit_protocol:CommitProtocol.agree", "committed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
