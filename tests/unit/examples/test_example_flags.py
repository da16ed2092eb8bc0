"""Bad input to the ImageNet example ends in one line: the flag, what was found, what is expected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from late_module import LateModule
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "imagenet"))  # as if the example had been started

from digits import write_digits

from edl_hvd.errors import UsageError

arguments, data, model = LateModule("arguments"), LateModule("data"), LateModule("model")
TRAIN = Path(__file__).parents[3] / "examples" / "imagenet" / "train.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture
def own_digits(digits: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return shutil.copytree(digits, tmp_path / "digits")


def flags(folder: Path, *words: str) -> Namespace:
    return arguments.parse_arguments(["--data", str(folder), "--image-size", "32", *words])


@pytest.mark.parametrize(
    ("words", "found", "expected"),
    [
        (["--epochs", "x"], "argument --epochs: found 'x'", "expected a whole number, 1 or more"),
        (["--epochs", "0"], "argument --epochs: found '0'", "expected a whole number, 1 or more"),
        (["--workers", "-1"], "argument --workers: found '-1'", "expected a whole number, 0 or more"),
        (["--lr", "0"], "argument --lr: found '0'", "expected a number greater than 0"),
        (["--lr", "nan"], "argument --lr: found 'nan'", "expected a number greater than 0"),
        (["--lr", "fast"], "argument --lr: found 'fast'", "expected a number greater than 0"),
        (["--weight-decay", "-1"], "argument --weight-decay: found '-1'", "expected a number, 0 or more"),
        (["--label-smoothing", "1"], "argument --label-smoothing: found '1'", "from 0 to less than 1"),
        (["--exact"], "argument --exact: found it without --micro-batch", "expected --global-batch and --micro-batch"),
        (
            ["--exact", "--worker-batch", "64", "--micro-batch", "32"],
            "argument --exact: found it without --global-batch",
            "expected --global-batch and --micro-batch",
        ),
        (["--crop-scale", "2"], "argument --crop-scale: found '2'", "from 0 to less than 1"),
        (["--arch", "resnet19"], "argument --arch: found 'resnet19'", "expected a classification model of torchvision"),
        (["--arch", "fcn_resnet50"], "argument --arch: found 'fcn_resnet50'", "expected a classification model"),
        (
            ["--global-batch", "64", "--micro-batch", "65"],
            "argument --micro-batch: found 65",
            "--global-batch, which is 64",
        ),
        (
            ["--worker-batch", "8", "--most-worker-batch", "7"],
            "argument --most-worker-batch: found 7",
            "no less than --worker-batch, which is 8",
        ),
        (["--most-worker-batch", "7"], "argument --most-worker-batch: found 7", "--worker-batch, which is left out"),
        (["--scaling", "cubic"], "argument --scaling: invalid choice: 'cubic'", "'linear', 'sqrt', 'adascale'"),
        (
            ["--worker-batch", "8", "--micro-batch", "9"],
            "argument --micro-batch: found 9",
            "--worker-batch, which is 8",
        ),
        (
            ["--worker-batch", "8", "--global-batch", "8"],
            "argument --global-batch",
            "not allowed with argument --worker-batch",
        ),
        (
            ["--warmup-epochs", "5", "--epochs", "5"],
            "argument --warmup-epochs: found 5",
            "less than --epochs, which is 5",
        ),
        (["--checkpoint-every", "often"], "argument --checkpoint-every: found 'often'", "'500 steps' or '1 epoch'"),
        (["--checkpoint", "bogus://x"], "argument --checkpoint: found 'bogus://x'", "expected a folder"),
        (["--events", "/dev/null/x"], "argument --events: found '/dev/null/x'", "cannot open the event log"),
        (["--seed", str(2**64)], f"argument --seed: found '{2**64}'", "a whole number, 0 or more and below 2^63"),
        (["--seed", "9" * 5000], "argument --seed: found '999", "below 2^63"),
        (["--global-batch", "٣"], "argument --global-batch: found '٣'", "expected a whole number, 1 or more"),
        (["--lr", "٣"], "argument --lr: found '٣'", "expected a number greater than 0"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3", ""),
    ],
)
def test_a_bad_flag_ends_in_one_line(words, found, expected, digits, capsys):
    with pytest.raises(SystemExit) as stopped:
        flags(digits, *words)
    line = capsys.readouterr().err
    assert stopped.value.code == 2
    assert line.count("\n") == 1
    assert found in line
    assert expected in line


def test_a_missing_folder_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        flags(tmp_path / "nowhere")
    line = capsys.readouterr().err
    assert f"argument --data: found no folder '{tmp_path / 'nowhere' / 'train'}'" in line
    assert "expected ImageNet's layout" in line
    assert line.count("\n") == 1


def test_a_class_without_images_is_named(own_digits):
    shutil.rmtree(own_digits / "train" / "3")
    (own_digits / "train" / "3").mkdir()
    with pytest.raises(UsageError, match=r"found no image in class '.*train/3'; expected at least one file"):
        data.load_data(flags(own_digits))


def test_a_class_in_one_split_only_is_named(own_digits):
    shutil.rmtree(own_digits / "val" / "7")
    with pytest.raises(UsageError, match="found class '7' in only one of train and val"):
        data.load_data(flags(own_digits))


def test_a_folder_without_classes_is_named(own_digits):
    shutil.rmtree(own_digits / "val")
    (own_digits / "val").mkdir()
    with pytest.raises(UsageError, match=r"found no class in '.*val'; expected one folder of images per class"):
        data.load_data(flags(own_digits))


def test_an_image_too_large_to_unpack_is_named(own_digits, monkeypatch):
    path = sorted((own_digits / "train" / "0").iterdir())[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow refuses more than twice as many; these have 4,096
    train_set, _ = data.load_data(flags(own_digits))
    with pytest.raises(UsageError, match=f"found an unreadable image '{path}' .* expected .* less than 179 megapixels"):
        train_set[0]


def test_a_palette_with_transparency_is_read_without_a_warning(own_digits, recwarn):
    path = own_digits / "train" / "0" / "0000.png"
    image = Image.new("P", (8, 8))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(path, transparency=b"\x00\xff")
    assert data.load_image(str(path)).getpixel((0, 0)) == (255, 0, 0)
    assert list(recwarn) == []


@pytest.mark.parametrize(
    ("words", "images", "size", "single"),
    [
        (["--global-batch", "32"], 97, 1, True),
        (["--global-batch", "32"], 98, 1, False),
        (["--global-batch", "32"], 98, 2, True),
        (["--global-batch", "32", "--limit-batches", "3"], 97, 1, False),
        (["--global-batch", "32", "--limit-batches", "4"], 97, 1, True),
        (["--global-batch", "32", "--micro-batch", "8"], 96 + 9, 1, True),
        (["--global-batch", "32", "--micro-batch", "8"], 96 + 10, 4, False),
        (["--global-batch", "32", "--micro-batch", "1"], 96, 1, True),
        (["--worker-batch", "32"], 65, 1, True),
        (["--worker-batch", "32"], 65, 2, True),
        (["--worker-batch", "32"], 68, 2, False),
    ],
)
def test_it_is_known_beforehand_whether_a_micro_batch_has_one_image(digits, words, images, size, single):
    assert arguments.has_single_images(flags(digits, *words), images, size) == single


def test_a_model_that_normalises_over_one_number_refuses_single_images_and_stays_as_it_was():
    resnet = model.build_model("resnet18", 10, 32)
    before = model.weights_hash(resnet)
    numbers = torch.get_rng_state()
    assert model.refuses_single_images(resnet, 32), "its last maps have one pixel"
    assert not model.refuses_single_images(resnet, 64)
    assert model.weights_hash(resnet) == before
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_last_micro_batch_of_one_image_is_refused_at_the_start_in_one_line(digits):
    words = [
        "--data",
        str(digits),
        "--arch",
        "resnet18",
        "--image-size",
        "32",
        "--global-batch",
        "500",
        "--workers",
        "0",
    ]
    done = subprocess.run([sys.executable, str(TRAIN), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: argument --global-batch: found 500, which leaves a micro-batch of one of")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"no image at all", None], ids=["empty", "text", "half a file"])
def test_an_unreadable_image_is_named(own_digits, content):
    path = sorted((own_digits / "train" / "0").iterdir())[0]
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    train_set, _ = data.load_data(flags(own_digits))
    with pytest.raises(UsageError, match=f"found an unreadable image '{path}'"):
        train_set[0]


def test_a_batch_smaller_than_the_world_is_refused(digits):
    with pytest.raises(UsageError, match="--global-batch: found 3, smaller than the world of 4 workers"):
        arguments.check_world(flags(digits, "--global-batch", "3"), 4)


def test_micro_batches_too_few_for_the_world_are_refused(digits):
    with pytest.raises(UsageError, match=r"--micro-batch: found 32, which makes 2 parts .* for 4 workers"):
        arguments.check_world(flags(digits, "--global-batch", "64", "--micro-batch", "32"), 4)


@pytest.mark.parametrize("words", ["--global-batch 4", "--worker-batch 1", "--global-batch 64 --micro-batch 16"])
def test_a_batch_with_something_for_everybody_is_accepted(words, digits):
    arguments.check_world(flags(digits, *words.split()), 4)


def test_an_image_size_that_the_model_cannot_use_is_refused():
    with pytest.raises(UsageError, match="argument --image-size: found 20, which alexnet does not work with"):
        model.build_model("alexnet", 10, 20)


@pytest.mark.parametrize("arch", ["googlenet", "vit_b_32"])
def test_architectures_with_wishes_of_their_own_are_built(arch):
    assert model.build_model(arch, 10, 64) is not None


@pytest.mark.parametrize(
    ("words", "rate"), [([], 0.1), (["--global-batch", "1024"], 0.4), (["--worker-batch", "64"], 0.025)]
)
def test_the_learning_rate_follows_the_batch(words, rate, digits):
    assert flags(digits, *words).lr == pytest.approx(rate)


def test_the_message_of_a_loading_process_loses_its_traceback():
    text = "Caught UsageError in DataLoader worker process 0.\nTraceback …\nedl_hvd.errors.UsageError: bad image\n"
    assert arguments.one_line(UsageError(text)) == "bad image"


def test_training_on_an_unreadable_image_ends_in_one_line_and_exit_code_2(own_digits):
    for path in (own_digits / "train").rglob("*.jpeg"):
        path.write_bytes(b"")
    done = train(own_digits, "--arch", "resnet18", "--workers", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: argument --data: found an unreadable image '")
    assert done.stderr.count("\n") == 1


def test_a_bad_flag_stops_the_program_before_anything_else(tmp_path):
    done = train(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: argument --data: found no folder")
    assert done.stderr.count("\n") == 1


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRAIN), "--data", str(folder), "--image-size", "32", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
