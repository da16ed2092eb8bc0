"""Train an image classifier on ImageNet, on a number of workers that may change.

    python train.py --data /data/imagenet

    horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script "discovery_scripts/from_file hosts.txt" \\
        python train.py --data /data/imagenet --checkpoint s3://bucket/resnet50

Both run the same file. With the second command hosts may come, leave or die; the trained model stays the same.
``python train.py --help`` lists the flags.
"""

from __future__ import annotations

import math
from argparse import Namespace

import torch
from arguments import check_world, fail, has_single_images, parse_arguments
from data import load_data
from model import build_model, parameter_groups, refuses_single_images, weights_hash
from progress import Progress
from torch.utils.data import DataLoader
from validate import Validation

import edl_hvd
from edl_hvd.errors import StorageError, UsageError


def main(arguments: Namespace) -> None:
    edl_hvd.init()
    check_world(arguments, edl_hvd.size())
    device = edl_hvd.device()

    train_set, val_set = load_data(arguments)
    batches = make_batches(arguments, len(train_set))
    loader = DataLoader(
        edl_hvd.SeededDataset(train_set),  # augmentation by seed, epoch and image
        batch_sampler=batches,
        num_workers=arguments.workers,
        pin_memory=device.type == "cuda",
    )

    torch.manual_seed(arguments.seed)
    model = build_model(arguments.arch, len(train_set.classes), arguments.image_size)
    model.to(device, memory_format=torch.channels_last)
    if has_single_images(arguments, len(train_set), edl_hvd.size()) and refuses_single_images(
        model, arguments.image_size
    ):
        flag = "--global-batch" if arguments.worker_batch is None else "--worker-batch"
        batch = arguments.global_batch or arguments.worker_batch
        raise UsageError(
            f"argument {flag}: found {batch}, which leaves a micro-batch of one of the {len(train_set)} images, and "
            f"{arguments.arch} at {arguments.image_size} pixels normalises over more than one; expected another batch "
            "or --micro-batch, or larger images"
        )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=arguments.label_smoothing)
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(parameter_groups(model, arguments.weight_decay), arguments.lr, arguments.momentum),
        named_parameters=model.named_parameters(),
        exact=arguments.exact,
        measure_noise=arguments.measure_noise,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: warmup_then_cosine(epoch, arguments.warmup_epochs, arguments.epochs)
    )
    autocast, scaler = mixed_precision(device, arguments.amp)
    validation = Validation(val_set, len(val_set.classes), arguments)
    state = edl_hvd.State(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, batches=batches, best_top1=0.0,
        **validation.kept,
    )  # fmt: skip
    progress = Progress(state, batches, optimizer, arguments.epochs, arguments.report_every)

    @edl_hvd.elastic(
        checkpoint=arguments.checkpoint, checkpoint_every=arguments.checkpoint_every, events=arguments.events
    )
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            model.train()
            for step in state.steps(loader):  # once per optimizer step, on every worker
                optimizer.zero_grad()
                for images, target in step:  # this worker's micro-batches: none, one or several
                    images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                    target = target.to(device, non_blocking=True)
                    with autocast:
                        loss = criterion(model(images), target)
                    scaler.scale(loss).backward()
                    step.record(loss=loss)
                scaler.step(optimizer)
                scaler.update()
                progress.update(step)
            scheduler.step()

            validation.run(state, autocast)
            top1, top5 = validation.top1.compute(), validation.top5.compute()
            state.best_top1 = max(state.best_top1, top1)
            state.report(top1=top1, top5=top5, validation_images=validation.top1.samples)
            progress.say(f"epoch {epoch + 1}/{arguments.epochs} · {validation} · best {state.best_top1:.2%}")

    with progress:
        train(state)
        progress.say(f"weights sha256 {weights_hash(model)}")


def make_batches(arguments: Namespace, images: int) -> edl_hvd.ElasticBatchSampler:
    """One of the two batch policies: the same step in every world, or a step that grows with the world."""
    if arguments.worker_batch is None:
        policy = edl_hvd.GlobalBatch(arguments.global_batch, arguments.micro_batch)
    else:
        chosen = arguments.most_worker_batch is not None
        policy = edl_hvd.WorkerBatch(
            "auto" if chosen else arguments.worker_batch,
            min=arguments.worker_batch if chosen else None,
            max=arguments.most_worker_batch,
            micro_batch=arguments.micro_batch,
            learning_rate=arguments.scaling,
            warmup_samples=round(arguments.warmup_epochs * images),
        )
    return edl_hvd.ElasticBatchSampler(
        images, policy=policy, seed=arguments.seed, limit_batches=arguments.limit_batches
    )


def mixed_precision(device: torch.device, wanted: bool) -> tuple[torch.autocast, edl_hvd.GradScaler]:
    """Half precision for the forward pass on a GPU: bfloat16, or float16 and a scaled loss on older ones."""
    use = wanted and device.type == "cuda"
    half = torch.float16 if use and not torch.cuda.is_bf16_supported() else torch.bfloat16
    return torch.autocast(device.type, half, enabled=use), edl_hvd.GradScaler(enabled=use and half == torch.float16)


def warmup_then_cosine(epoch: int, warmup_epochs: float, epochs: int) -> float:
    """The factor of the learning rate in an epoch: it rises to 1, then falls to 0 along a half cosine.

    It counts epochs, not steps, whose number depends on the world if each worker has a batch of its own.
    """
    if epoch < warmup_epochs:
        return (epoch + 1) / (warmup_epochs + 1)
    return (1 + math.cos(math.pi * (epoch - warmup_epochs) / (epochs - warmup_epochs))) / 2


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except (UsageError, StorageError) as error:
        fail(error)
