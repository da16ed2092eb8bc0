"""Write scikit-learn's handwritten digits as JPEG files in ImageNet's folder layout.

    python digits.py runs/digits

    runs/digits/train/0/0000.jpeg … runs/digits/train/9/1792.jpeg     1,501 images
    runs/digits/val/0/0048.jpeg   … runs/digits/val/9/1795.jpeg         296 images

The 1,797 images ship inside the scikit-learn package, so nothing is downloaded. Every sixth image of a class
goes to ``val``. The result is the same on every machine; an existing folder is not changed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from PIL import Image

SIDE_PIXELS = 64  # the originals are 8 x 8; this leaves room for a random crop
JPEG_QUALITY = 95
VALIDATION_EVERY = 6


def write_digits(folder: Path) -> Path:
    """Write the data set into ``folder`` unless it is there, and return ``folder``.

    The files appear all at once: they are written beside ``folder`` and renamed, so an interrupted call leaves
    nothing half done and two calls at the same time do not mix.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _write_images(scratch)
        scratch.chmod(0o755)  # mkdtemp makes a private folder
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # not just another call that was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_images(folder: Path) -> None:
    from sklearn.datasets import load_digits  # takes a second, and the files may be there

    digits = load_digits()
    seen = dict.fromkeys(range(10), 0)
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
        seen[label] += 1
        split = "val" if seen[label] % VALIDATION_EVERY == 0 else "train"
        path = folder / split / str(label) / f"{number:04d}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"))  # the originals count ink from 0 to 16
        image.resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BICUBIC).save(path, quality=JPEG_QUALITY)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write; not changed if it exists")
    write_digits(parser.parse_args().folder)
