"""The examples that learn images of a folder, or of CIFAR-10's files, and text letter by letter."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from waiting import soon

from edl_hvd.distill.outputs import Outputs
from edl_hvd.distill.teacher import Teacher
from edl_hvd.frames import ArrayType

pytestmark = pytest.mark.distill

EXAMPLE = Path(__file__).parents[3] / "examples" / "distill"
PROGRAMS = Path(sys.executable).parent


def run(folder: Path, *words: object) -> str:
    """What a command prints that ends well."""
    variables = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_images(folder: Path) -> None:
    """Images of two classes, in ImageNet's layout."""
    chance = numpy.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for shade, name in ((60, "dark"), (190, "light")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = (shade + chance.integers(-50, 50, (40, 48, 3))).astype("uint8")
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def write_cifar(folder: Path) -> None:
    """Files as CIFAR-10's authors write them, with few images."""
    chance = numpy.random.default_rng(0)
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = {"data": chance.integers(0, 256, (8, 3072), dtype="uint8"), "labels": [*range(8)]}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content))
    names = [f"class-{number}" for number in range(10)]
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))


def test_files_of_cifar_10_are_read_as_pixels(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import images

    # torchvision compares their checksums with those of the real files.
    monkeypatch.setattr(images.torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: True)
    write_cifar(tmp_path)
    train, test, classes = images.open_data(tmp_path, size=224)
    assert (len(train), len(test), classes) == (40, 8, 10)
    pixels, target = train[3]
    assert (pixels.dtype, tuple(pixels.shape), target) == (torch.uint8, (3, 32, 32), 3)


def test_a_teacher_is_trained_and_teaches_what_it_has_learned(tmp_path, monkeypatch):
    write_images(tmp_path / "data")
    words = [sys.executable, EXAMPLE / "images.py", "--data", "data", "--image-size", "32", "--epochs", "1"]
    words += ["--global-batch", "16", "--micro-batch", "8", "--workers", "0", "--learning-rate", "0.02"]
    run(tmp_path, *words, "--labels-only", "--save", "runs/distill/teacher.pt")
    monkeypatch.setenv("EDL_HVD_EXAMPLE_TEACHER", str(tmp_path / "runs/distill/teacher.pt"))
    alone = run(tmp_path, *words)
    teach = subprocess.Popen(
        [PROGRAMS / "edl-hvd", "teach", f"{EXAMPLE}/images.py:build", "--devices", "cpu", "--port", "0"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert teach.stdout is not None
    try:
        port = re.search(r"answers at 127\.0\.0\.1:(\d+)", teach.stdout.readline())
        assert port is not None
        (tmp_path / "teachers.txt").write_text("localhost:1\n")
        job = [PROGRAMS / "edlrun", "-np", "2", "--min-np", "1", "--teachers", "file:teachers.txt"]
        elsewhere = run(tmp_path, *job, *words, "--port", port[1])
    finally:
        teach.terminate()
        assert soon(teach) == 0
        teach.stdout.close()
    losses = [float(re.search(r"epoch 1: loss ([0-9.]+)", output)[1]) for output in (alone, elsewhere)]
    assert losses[0] == pytest.approx(losses[1], rel=0.2), "BatchNorm's batches aside, it is the same training"
    assert "accuracy" in alone
    assert "accuracy" in elsewhere


def test_a_small_network_continues_text_as_a_larger_one_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    import sequence

    teacher = sequence.build(epochs=0)
    answer = Teacher.of(teacher).probe((ArrayType("line", "uint8", (63,)),), 4, Outputs.parse(sequence.TOP), False)
    assert {array.type.name: array.type.shape[1:] for array in answer} == {
        "values": (63, 8), "indices": (63, 8), "rest": (63,)
    }  # fmt: skip
    output = run(tmp_path, sys.executable, EXAMPLE / "sequence.py", "--epochs", "1")
    nats = re.search(r"nats per letter ([0-9.]+)", output)
    assert nats is not None
    assert float(nats[1]) < torch.log(torch.tensor(float(sequence.LETTERS))).item() - 1.0, "better than by chance"
