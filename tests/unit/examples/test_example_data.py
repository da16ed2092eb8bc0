"""The example's data: digits written as files, and augmentation that depends on the image alone."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from late_module import LateModule
from PIL import Image
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "imagenet"))  # as if the example had been started

import digits
from digits import write_digits

import edl_hvd

data = LateModule("data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


def flags(path: Path, seed: int = 0) -> Namespace:
    return Namespace(data=path, image_size=32, crop_scale=0.3, flip=True, seed=seed)


def test_all_digits_are_written_each_to_one_split(folder):
    train, val = (sorted(path.name for path in (folder / split).rglob("*.jpeg")) for split in ("train", "val"))
    assert sorted(train + val) == [f"{number:04d}.jpeg" for number in range(1797)]
    assert (len(train), len(val)) == (1501, 296)


def test_every_class_is_in_both_splits(folder):
    for split in ("train", "val"):
        assert sorted(path.name for path in (folder / split).iterdir()) == [str(digit) for digit in range(10)]


def test_the_files_are_images(folder):
    with Image.open(folder / "train" / "0" / "0000.jpeg") as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))
        assert image.getextrema()[1] > 200  # there is ink


def test_writing_again_changes_nothing(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_digits(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_two_writings_are_equal_byte_for_byte(folder, tmp_path):
    again = write_digits(tmp_path / "again")
    for path in folder.rglob("*.jpeg"):
        assert (again / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_an_interrupted_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(folder: Path) -> None:
        (folder / "train").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "_write_images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_of_two_writings_at_once_the_later_gives_way(tmp_path, monkeypatch):
    def overtaken(scratch: Path) -> None:
        (tmp_path / "digits" / "train").mkdir(parents=True)

    monkeypatch.setattr(digits, "_write_images", overtaken)
    write_digits(tmp_path / "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def images_of(train_set, order, seed=0, epoch=3, workers=0):
    """The images of an epoch by their number, loaded as ``train.py`` does."""
    batches = edl_hvd.ElasticBatchSampler(
        len(train_set), global_batch=2, seed=seed, order=Picked(len(train_set), order)
    )
    batches.set_epoch(epoch)
    loader = DataLoader(edl_hvd.SeededDataset(train_set), batch_sampler=batches, num_workers=workers)
    images = [image for images, _ in loader for image in images]
    return dict(zip(order, images, strict=True))


class Picked(edl_hvd.Order):
    """Some images, in an order that the test chooses."""

    name = "picked"

    def __init__(self, length, indices):
        self.length, self.positions, self.indices = length, len(indices), indices

    def samples(self, seed, epoch, first, last):
        return self.indices[first:last]


def test_augmentation_does_not_depend_on_who_loads_the_image(folder):
    train_set, _ = data.load_data(flags(folder))
    alone = {index: images_of(train_set, [index])[index] for index in (5, 900, 17)}
    torch.manual_seed(99)  # another process, with another past
    for workers in (0, 2):
        images = images_of(train_set, [17, 5, 900], workers=workers)
        assert all(torch.equal(images[index], alone[index]) for index in alone)


def test_augmentation_changes_with_the_epoch_the_seed_and_the_image(folder):
    train_set, _ = data.load_data(flags(folder))
    train_set.samples[8] = train_set.samples[7]  # the same file under another number
    images = images_of(train_set, [7, 8])
    assert not torch.equal(images[7], images[8])
    assert not torch.equal(images[7], images_of(train_set, [7], seed=1)[7])
    assert not torch.equal(images[7], images_of(train_set, [7], epoch=1)[7])


def test_validation_images_are_not_augmented(folder):
    _, val_set = data.load_data(flags(folder))
    assert torch.equal(val_set[0][0], val_set[0][0])
