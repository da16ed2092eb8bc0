"""Images in ImageNet's folder layout. Augmentation draws from the usual generators, which ``train.py`` has seeded."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from vision import torchvision

from edl_hvd.errors import UsageError

ImageFolder = torchvision.datasets.ImageFolder
transforms = torchvision.transforms

# Mean and deviation of ImageNet's red, green and blue.
NORMALIZE = transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# The field validates on the middle 224 of 256 pixels; the same share is kept at other sizes.
RESIZE_OVER_CROP = 256 / 224


def load_data(arguments: Namespace) -> tuple[ImageFolder, ImageFolder]:
    """Load the training and the validation set that the flags ask for.

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
    train = _open_split(folder / "train", transforms.Compose(augment + finish))
    val = _open_split(folder / "val", transforms.Compose(centre + finish))
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
            # By way of RGBA, as Pillow asks for in a warning at each such image.
            clear = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
            return clear.convert("RGB")
    # Pillow reports some broken files as SyntaxError.
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"argument --data: found an unreadable image {path!r} ({reason}); expected a whole JPEG or PNG file of "
            "less than 179 megapixels"
        ) from error


def _open_split(folder: Path, transform: transforms.Compose) -> ImageFolder:
    try:
        split = ImageFolder(str(folder), transform, loader=load_image, allow_empty=True)
    except FileNotFoundError:  # torchvision's error for a folder without folders
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
