"""The flags of ``train.py``. A wrong one ends in one line: the flag, its value, and what is expected."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vision import torchvision

from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.events import EventLog
from edl_hvd.storage import open_storage
from edl_hvd.values import Interval

# Goyal et al., "Accurate, Large Minibatch SGD", 2017: 0.1 at 256 images, in proportion for other batches.
LEARNING_RATE_PER_IMAGE = 0.1 / 256

_MOST_DIGITS = 40  # that are read, and shown; no number that is accepted has as many


class OneLineParser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that adds the default of a flag to its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; a mistake ends the process with exit code 2."""
    parser = _parser()
    arguments = parser.parse_args(words)
    _fill_in(arguments)
    try:
        _check(arguments)
    except UsageError as error:
        parser.error(str(error))
    return arguments


def check_world(arguments: argparse.Namespace, size: int) -> None:
    """Refuse a batch that cannot give every worker of a world of ``size`` something to do.

    Raises:
        UsageError: The message names the flag.
    """
    if arguments.global_batch is None:
        return
    if arguments.global_batch < size:
        raise UsageError(
            f"argument --global-batch: found {arguments.global_batch}, smaller than the world of {size} workers; "
            "expected at least one image for each worker"
        )
    parts = -(-arguments.global_batch // (arguments.micro_batch or 1))
    if parts < size:
        raise UsageError(
            f"argument --micro-batch: found {arguments.micro_batch}, which makes {parts} parts of --global-batch "
            f"{arguments.global_batch} for {size} workers; expected at least one part for each worker"
        )


def has_single_images(arguments: argparse.Namespace, images: int, size: int) -> bool:
    """Whether a world of ``size`` computes a micro-batch of one image in an epoch of ``images``."""
    step = arguments.global_batch or arguments.worker_batch * size
    last = images % step if arguments.limit_batches is None or images <= step * arguments.limit_batches else 0
    for samples in (step if images >= step else 0, last):
        if arguments.micro_batch is None:  # each worker's whole share; shares differ by one image at most
            found = 0 < samples < 2 * size
        else:
            found = samples > 0 and (arguments.micro_batch == 1 or samples % arguments.micro_batch == 1)
        if found:
            return True
    return False


def one_line(error: BaseException) -> str:
    """The message of ``error`` without the traceback that a data-loading process puts before it."""
    last = str(error).strip().splitlines()[-1]
    return last.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")


def fail(error: BaseException) -> NoReturn:
    """End the process with one line and exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {one_line(error)}", file=sys.stderr)
    sys.exit(2)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        description="Train an image classifier on ImageNet, or on any data set in its folder layout.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, type=Path, help="folder with train/<class>/… and val/<class>/…")
    data.add_argument("--image-size", type=_whole(1), default=224, help="side of the square the model sees, in pixels")
    data.add_argument("--crop-scale", type=_fraction, default=0.08, help="least share of the area that a crop keeps")
    data.add_argument("--flip", action=argparse.BooleanOptionalAction, default=True, help="mirror half of the images")
    data.add_argument("--workers", type=_whole(0), default=8, help="processes that load images, per worker")
    data.add_argument("--limit-batches", type=_whole(1), help="batches per epoch, for a short trial")

    model = parser.add_argument_group("model")
    model.add_argument("--arch", default="resnet50", help="any classification model of torchvision")
    model.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="mixed precision on a GPU")

    batch = parser.add_argument_group("batch")
    either = batch.add_mutually_exclusive_group()
    either.add_argument("--global-batch", type=_whole(1), help="images per step over all workers [256]")
    either.add_argument("--worker-batch", type=_whole(1), help="images per step on each worker")
    batch.add_argument(
        "--most-worker-batch",
        type=_whole(1),
        help="choose each worker's batch while training, from --worker-batch up to this",
    )
    batch.add_argument(
        "--scaling",
        choices=["linear", "sqrt", "adascale"],
        default="linear",
        help="how the learning rate follows the batch, with --worker-batch",
    )
    batch.add_argument("--micro-batch", type=_whole(1), help="images per forward pass [a worker's whole share]")
    batch.add_argument("--exact", action="store_true", help="the same weights, bit for bit, for any number of workers")

    schedule = parser.add_argument_group("schedule and optimizer")
    schedule.add_argument("--epochs", type=_whole(1), default=90, help="number of epochs")
    schedule.add_argument("--lr", type=_positive, help="learning rate after warm-up [0.1 per 256 images of a step]")
    schedule.add_argument("--warmup-epochs", type=_zero_or_more, help="epochs of warm-up [5, at most epochs / 10]")
    schedule.add_argument("--momentum", type=_fraction, default=0.9, help="momentum of SGD")
    schedule.add_argument("--weight-decay", type=_zero_or_more, default=1e-4, help="not applied to biases and norms")
    schedule.add_argument("--label-smoothing", type=_fraction, default=0.1, help="share of the target spread evenly")
    schedule.add_argument("--seed", type=_whole(0), default=0, help="fixes weights, order and augmentation")

    job = parser.add_argument_group("job")
    job.add_argument("--checkpoint", help="folder or URL for checkpoints, e.g. s3://bucket/run")
    job.add_argument(
        "--checkpoint-every", type=_interval, help="interval, e.g. 10min, '500 steps', '1 epoch' or auto [auto]"
    )
    job.add_argument("--events", help="file to which events are appended as JSON lines")
    job.add_argument("--measure-noise", action="store_true", help="report how noisy the gradient is, in --events")
    job.add_argument("--report-every", type=_whole(1), default=10, help="steps between two metrics in --events")
    return parser


def _fill_in(arguments: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if arguments.worker_batch is None and arguments.global_batch is None:
        arguments.global_batch = 256
    if arguments.lr is None:
        arguments.lr = LEARNING_RATE_PER_IMAGE * (arguments.worker_batch or arguments.global_batch)
    if arguments.warmup_epochs is None:
        arguments.warmup_epochs = min(5.0, arguments.epochs / 10)


def _check(arguments: argparse.Namespace) -> None:
    """Check flags that depend on each other."""
    if arguments.arch not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(
            f"argument --arch: found {arguments.arch!r}; expected a classification model of torchvision, "
            "such as resnet50, vit_b_16 or efficientnet_v2_s"
        )
    if arguments.most_worker_batch is not None and arguments.most_worker_batch < (arguments.worker_batch or 1 << 62):
        raise UsageError(
            f"argument --most-worker-batch: found {arguments.most_worker_batch}; expected no less than --worker-batch, "
            f"which is {arguments.worker_batch or 'left out'}"
        )
    flag = "--global-batch" if arguments.worker_batch is None else "--worker-batch"
    batch = arguments.global_batch or arguments.worker_batch
    if arguments.micro_batch is not None and arguments.micro_batch > (arguments.most_worker_batch or batch):
        raise UsageError(
            f"argument --micro-batch: found {arguments.micro_batch}; expected no more than {flag}, which is {batch}"
        )
    if arguments.exact and (arguments.micro_batch is None or arguments.worker_batch is not None):
        missing = "--micro-batch" if arguments.micro_batch is None else "--global-batch"
        raise UsageError(
            f"argument --exact: found it without {missing}; expected --global-batch and --micro-batch, so that every "
            "world computes the same parts"
        )
    if arguments.warmup_epochs >= arguments.epochs:
        raise UsageError(
            f"argument --warmup-epochs: found {arguments.warmup_epochs:g}; "
            f"expected less than --epochs, which is {arguments.epochs}"
        )
    for split in ("train", "val"):
        if not (arguments.data / split).is_dir():
            raise UsageError(
                f"argument --data: found no folder {str(arguments.data / split)!r}; expected ImageNet's layout, "
                "train/<class>/<image> and val/<class>/<image>"
            )
    _check_place("--checkpoint", arguments.checkpoint, open_storage)
    _check_place("--events", arguments.events, lambda path: EventLog(path).close())


def _check_place(flag: str, place: str | None, open_place: Callable[[str], object]) -> None:
    """Refuse now what would otherwise be refused after the data set is listed."""
    if place is None:
        return
    try:
        open_place(place)
    except EdlHvdError as error:
        raise UsageError(f"argument {flag}: found {place!r}; {error}") from error


def _whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"found {text[:_MOST_DIGITS]!r}; expected a whole number, {least} or more and below 2^63"
            )
        return int(text)

    return read


def _number(expected: str, accepted: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() else float("nan")
        except ValueError:
            value = float("nan")
        if not accepted(value):  # false for "not a number" too
            raise argparse.ArgumentTypeError(f"found {text!r}; expected {expected}")
        return value

    return read


_positive = _number("a number greater than 0", lambda value: 0 < value < float("inf"))
_zero_or_more = _number("a number, 0 or more", lambda value: 0 <= value < float("inf"))
_fraction = _number("a number from 0 to less than 1", lambda value: 0 <= value < 1)


def _interval(text: str) -> Interval:
    try:
        return Interval.parse_or_auto(text)
    except UsageError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected a time or a count such as '30s', '10min', '500 steps' or '1 epoch', or auto"
        ) from None
