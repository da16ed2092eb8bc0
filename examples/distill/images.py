"""A network learns the images of a folder from their labels, and from what a larger network says of them.

python examples/distill/images.py --data DATA --arch resnet50 --labels-only --save runs/distill/teacher.pt
edl-hvd teach examples/distill/images.py:build
edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/images.py --data DATA --arch resnet18

DATA has ImageNet's layout, train/CLASS/ and val/CLASS/ with images, or holds CIFAR-10 as its authors give it, in the
folder cifar-10-batches-py. The first command trains the teacher; EDL_HVD_EXAMPLE_TEACHER names another file than that.
Teachers get the pixels as uint8, cropped and flipped as the student sees them, and need no data of their own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd import distill
from edl_hvd.compat.torchvision_operators import define_missing_operators

define_missing_operators()  # torchvision from PyPI beside a CPU build of torch

import torchvision  # noqa: E402
from torchvision import transforms  # noqa: E402

TEACHER = Path("runs/distill/teacher.pt")
CIFAR = "cifar-10-batches-py"


class Normalized(torch.nn.Module):
    """A model of torchvision that takes pixels as uint8.

    Args:
        arch: Name of the model.
        classes: Number of classes.
    """

    def __init__(self, arch: str, classes: int) -> None:
        super().__init__()
        self.model = torchvision.models.get_model(arch, weights=None, num_classes=classes)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of images of shape (samples, 3, height, width)."""
        return self.model((pixels / 255 - self.mean) / self.deviation)


def build() -> torch.nn.Module:
    """The teacher, for ``edl-hvd teach``."""
    path = Path(os.environ.get("EDL_HVD_EXAMPLE_TEACHER", TEACHER))
    if not path.exists():
        raise FileNotFoundError(f"no teacher in {path}; train one with --labels-only --save {path}")
    saved = torch.load(path, weights_only=True)
    model = Normalized(saved["arch"], saved["classes"])
    model.load_state_dict(saved["weights"])
    return model


def open_data(folder: Path, size: int) -> tuple[Any, Any, int]:
    """The training set, the set for validation, and the number of classes; images are uint8."""
    to_pixels = transforms.PILToTensor()
    if (folder / CIFAR).is_dir():
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), to_pixels]
        cifar = torchvision.datasets.CIFAR10
        train = cifar(folder, train=True, transform=transforms.Compose(augment))
        return train, cifar(folder, train=False, transform=to_pixels), len(train.classes)
    augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), to_pixels]
    centre = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size), to_pixels]
    train = torchvision.datasets.ImageFolder(folder / "train", transforms.Compose(augment))
    val = torchvision.datasets.ImageFolder(folder / "val", transforms.Compose(centre))
    return train, val, len(train.classes)


@torch.no_grad()
def accuracy(model: torch.nn.Module, dataset: Any, batch_size: int) -> float:
    """Part of the images that a model recognises."""
    right = sum(
        int((model(images.to(edl_hvd.device())).argmax(1).cpu() == target).sum())
        for images, target in DataLoader(dataset, batch_size)
    )
    return right / len(dataset)


def parse_arguments() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--arch", default="resnet18", help="model of torchvision that learns (default resnet18)")
    parser.add_argument("--image-size", type=int, default=224, help="of ImageNet's layout (default 224)")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--weight", type=float, default=0.9, help="of the teacher's part (default 0.9)")
    parser.add_argument("--labels-only", action="store_true", help="without a teacher")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained model for build()")
    parser.add_argument("--workers", type=int, default=2, help="loader processes of each worker (default 2)")
    parser.add_argument("--port", type=int, default=7010, help="of the first teacher of each host")
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss of each epoch, and the accuracy at the end."""
    arguments = parse_arguments()
    edl_hvd.init()
    torch.manual_seed(0)
    train_set, val_set, classes = open_data(arguments.data, arguments.image_size)
    model = Normalized(arguments.arch, classes).to(edl_hvd.device())
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9, weight_decay=1e-4),
        model.named_parameters(),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    batches = edl_hvd.ElasticBatchSampler(
        len(train_set), global_batch=arguments.global_batch, micro_batch=arguments.micro_batch, seed=0
    )
    # Crops and flips follow the sample: whoever computes a micro-batch again sends the same pixels.
    loader: Any = DataLoader(edl_hvd.SeededDataset(train_set), batch_sampler=batches, num_workers=arguments.workers)
    if not arguments.labels_only:
        teachers = distill.Teachers(local=build, port=arguments.port)
        loader = distill.DistillLoader(loader, teachers, send=lambda batch: batch[0])
    state = edl_hvd.State(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, loss=edl_hvd.metrics.Mean()
    )

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            model.train()
            for step in state.steps(loader):
                for images, target, *answers in step:
                    logits, target = model(images.to(edl_hvd.device())), target.to(edl_hvd.device())
                    if answers:
                        loss = distill.distillation_loss(
                            logits, answers[0], target, temperature=arguments.temperature, weight=arguments.weight
                        )
                    else:
                        loss = torch.nn.functional.cross_entropy(logits, target)
                    loss.backward()
                    state.loss.update(loss, weight=len(images))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            mean_loss = state.loss.compute()
            if edl_hvd.rank() == 0:
                print(f"epoch {epoch + 1}: loss {mean_loss:.6f}, workers {edl_hvd.size()}", flush=True)
        if edl_hvd.rank() == 0:
            if arguments.save is not None:
                arguments.save.parent.mkdir(parents=True, exist_ok=True)
                weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
                torch.save({"arch": arguments.arch, "classes": classes, "weights": weights}, arguments.save)
            print(f"accuracy {accuracy(model.eval(), val_set, arguments.global_batch):.4f}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
