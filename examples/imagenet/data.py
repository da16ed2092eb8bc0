"""Images in ImageNet's folder layout, augmented alike wherever they are loaded."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from vision import torchvision

from edl_hvd.data.randomness import seed_of
from edl_hvd.errors import UsageError

transforms = torchvision.transforms

# Mean and deviation of ImageNet's red, green and blue.
NORMALIZE = transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# The field validates on the middle 224 of 256 pixels; the same share is kept at other sizes.
RESIZE_OVER_CROP = 256 / 224


class SeededImageFolder(torchvision.datasets.ImageFolder):
    """An ``ImageFolder`` whose random transforms depend on seed, epoch and image only.

    Which worker or loading process draws an image changes when the world does; what is drawn must not. Every
    image therefore gets a random state of its own. torchvision's transforms draw from torch's generator alone.
    """

    def __init__(self, root: Path, transform: transforms.Compose, seed: int) -> None:
        super().__init__(str(root), transform, loader=load_image, allow_empty=True)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the augmentation of ``epoch``; call it before the loader starts on that epoch."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=()):
            # Not torch.manual_seed: it would seed the GPU's generator too.
            torch.default_generator.manual_seed(seed_of(self.seed, self.epoch, index))
            return super().__getitem__(index)


def load_data(arguments: Namespace) -> tuple[SeededImageFolder, SeededImageFolder]:
    """The training and the validation set that the flags ask for.

    Raises:
        UsageError: The layout is not ImageNet's; the message names what is wrong.
    """
    folder, image_size = arguments.data, arguments.image_size
    augment = [
        transforms.RandomResizedCrop(image_size, scale=(arguments.crop_scale, 1)),
        *([transforms.RandomHorizontalFlip()] if arguments.flip else []),
    ]
    centre = [transforms.Resize(round(image_size * RESIZE_OVER_CROP)), transforms.CenterCrop(image_size)]
    finish = [transforms.ToTensor(), NORMALIZE]
    train = _open_split(folder / "train", transforms.Compose(augment + finish), arguments.seed)
    val = _open_split(folder / "val", transforms.Compose(centre + finish), arguments.seed)
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UsageError(
            f"argument --data: found class {odd[0]!r} in only one of train and val below {str(folder)!r}; "
            "expected the same classes in both"
        )
    return train, val


def load_image(path: str) -> Image.Image:
    """Read an image file as RGB.

    Raises:
        UsageError: The file is not a readable image.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:  # Pillow reports some broken files as SyntaxError
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"argument --data: found an unreadable image {path!r} ({reason}); expected a whole JPEG or PNG file"
        ) from error


def _open_split(folder: Path, transform: transforms.Compose, seed: int) -> SeededImageFolder:
    try:
        split = SeededImageFolder(folder, transform, seed)
    except FileNotFoundError:  # torchvision's word for a folder without folders
        raise UsageError(
            f"argument --data: found no class in {str(folder)!r}; expected one folder of images per class"
        ) from None
    images = Counter(split.targets)
    for name, label in split.class_to_idx.items():
        if not images[label]:
            raise UsageError(
                f"argument --data: found no image in class {str(folder / name)!r}; "
                f"expected at least one file ending in {', '.join(torchvision.datasets.folder.IMG_EXTENSIONS[:3])} …"
            )
    return split
