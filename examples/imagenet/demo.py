"""Train while hosts join, die and leave, and show that nothing was lost.

    python examples/imagenet/demo.py                          handwritten digits; minutes on two cores
    python examples/imagenet/demo.py --short                  the same with fewer epochs
    python examples/imagenet/demo.py --exact --schedule 7     other times, the same weights, bit for bit
    python examples/imagenet/demo.py --data /data/imagenet    the same job on real data; needs a GPU

``edlrun`` (or stock ``horovodrun``, with ``--launcher``) starts with one host; a second joins, one is killed, one
returns, one leaves. Then the event log is read for the tables and the picture ``report.png``. The exit code is 0 only
if each promise was kept. Flags after ``--`` go to ``train.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import fail, parse_arguments
from data import load_data
from demos import CONSOLE, Promise, StageError, demo_parser, digest_of, play, show_promises
from digits import write_digits
from expected import ExpectedRun, check_run
from picture import draw
from report import Report, summarize
from screen import Screen
from script import FIRST, SCRIPT, SECOND, Director, shifted
from show import show_report
from stage import HostStage

from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.events import read_events

TRAIN = Path(__file__).resolve().with_name("train.py")
ON_DIGITS = """
    --arch resnet18 --image-size 32 --crop-scale 0.7 --no-flip --workers 0
    --global-batch 128 --micro-batch 64 --lr 0.1
"""
EPOCHS, SHORT_EPOCHS = 16, 10
LAUNCHERS = ("edlrun", "horovodrun")
# A part of the training: the whole takes days on a small machine.
ON_REAL_DATA = "--arch resnet50 --epochs 2 --limit-batches 100 --workers 4"
TOP1_ON_DIGITS = 0.96
POLL_S = 0.1
# Longest wait in seconds for the end of a scene, or for any event. A worker starts within seconds, on a loaded machine
# within tens of them; on real data it lists a million files first, and on CPUs a step takes a minute.
PATIENCE_S, PATIENCE_ON_REAL_DATA_S = 120.0, 1800.0


def main() -> int:
    """Perform, print the tables, and return the exit code."""
    options = read_options()
    on_digits = options.data is None
    folder: Path = options.output
    data = options.data or write_digits(folder.parent / "digits")
    words = train_flags(options, data)
    expected = expected_run(words, TOP1_ON_DIGITS if on_digits else None)

    CONSOLE.print(f"[bold]{expected.epochs} epochs of {expected.samples_per_epoch:,} images[/] from {data}")
    clear(folder)
    events = folder / "events.jsonl"
    job = ["--events", str(events), "--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "1 epoch"]
    samples = expected.epochs * expected.samples_per_epoch
    patience_s = PATIENCE_S if on_digits else PATIENCE_ON_REAL_DATA_S
    with closing(HostStage(folder, [FIRST], options.launcher)) as stage, Screen(CONSOLE, samples) as screen:
        director = Director(samples, shifted(SCRIPT, options.schedule))
        performance = Performance(stage, screen, events, director, patience_s)
        problem = performance.run([sys.executable, str(TRAIN), *words, *job])

    report = summarize(read_events(events) if events.exists() else [])
    show_report(CONSOLE, report)
    left = left_behind(report, stage.output, f"{data.name}: {expected.epochs} epochs while hosts come and go")
    scenes = "see below" if problem else f"{len(SCRIPT)} scenes"
    played = Promise("all scenes are played, exit code 0", scenes, not problem)
    code = show_promises([*check_run(report, expected), played], left)
    if problem:
        raise StageError(problem)
    return code


def left_behind(report: Report, output: Path, title: str) -> str:
    """Draw the picture and note the weights; what lies where, one line each."""
    folder = output.parent
    lines = [f"Events   {folder / 'events.jsonl'}", f"Output   {output}"]
    if report.losses and len(report.samples) > 1:
        draw(report, folder / "report.png", title)
        lines.insert(0, f"Picture  {folder / 'report.png'}")
    digest = digest_of(output.read_text(errors="replace"))
    (folder / "weights.sha256").write_text(f"{digest}\n" if digest else "")
    return "\n".join([*lines, f"Weights  sha256 {digest or 'unknown'}\n"])


class Performance:
    """One run of the job, with the script played on it.

    Args:
        stage: Stage on which it runs.
        screen: Screen that shows it.
        events: Path of its event log, which need not exist yet.
        director: Director that says which scene is due.
        patience_s: Longest wait in seconds for the end of a scene, or for any event.
    """

    def __init__(self, stage: HostStage, screen: Screen, events: Path, director: Director, patience_s: float) -> None:
        self._stage = stage
        self._screen = screen
        self._director = director
        self._log = tail(events)
        self._pids: dict[str, int] = {}
        self._patience_s = patience_s
        self._scene_began_s = self._last_event_s = 0.0

    def run(self, command: list[str]) -> str | None:
        """From the first worker's start to the job's end, however it ends.

        Returns:
            What went wrong, or ``None``.
        """
        self._stage.start_job(command)
        self._last_event_s = time.monotonic()
        while self._stage.exit_code() is None:
            self._take_in()
            self._direct()
            problem = self._stuck()
            if problem:
                return problem + self._last_words()
            time.sleep(POLL_S)
        self._take_in()
        if self._stage.exit_code() != 0:
            return f"The launcher ended with exit code {self._stage.exit_code()}.{self._last_words()}"
        undone = [scene.title for scene in (self._director.playing, *self._director.waiting) if scene]
        if undone:
            return f"Training ended before the script did; undone: {', '.join(undone)}. Give it more --epochs."
        return None

    def _take_in(self) -> None:
        for line in next(self._log):
            self._last_event_s = time.monotonic()
            self._director.observe(line)
            self._screen.observe(line)
            if line["event"] == "job_started":
                host = line["worker"].rpartition(":")[0]
                self._pids[host] = line["pid"]

    def _direct(self) -> None:
        scene = self._director.next_scene()
        if scene is not None:
            self._screen.announce(scene.title)
            self._stage.perform(scene, self._pids)
            self._scene_began_s = time.monotonic()

    def _stuck(self) -> str | None:
        now_s, playing = time.monotonic(), self._director.playing
        if playing and now_s - self._scene_began_s > self._patience_s:
            return f"Not over after {self._patience_s:.0f} s: {playing.title}."
        if now_s - self._last_event_s > self._patience_s:
            return f"Nothing has happened for {self._patience_s:.0f} s."
        return None

    def _last_words(self) -> str:
        return f" The last lines of {self._stage.output}:\n{self._stage.last_words()}"


def tail(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The new lines of an event log at each call; whole lines only."""
    seen = 0
    while True:
        lines = read_events(path) if path.exists() else []
        yield lines[seen:]
        seen = len(lines)


def expected_run(words: list[str], top1: float | None) -> ExpectedRun:
    """What is promised of the job with these flags. Checks flags and data before anything is started."""
    flags = parse_arguments(words)
    train_set, _ = load_data(flags)
    samples = len(train_set)
    if flags.limit_batches is not None:
        if flags.global_batch is None:
            raise UsageError(
                "argument --limit-batches: found it together with --worker-batch; here it needs --global-batch, "
                "because the samples of an epoch are counted and must not depend on the number of workers"
            )
        samples = min(samples, flags.limit_batches * flags.global_batch)
    return ExpectedRun(
        epochs=flags.epochs,
        samples_per_epoch=samples,
        sizes=(1, *(scene.size for scene in SCRIPT)),
        lost=(f"{FIRST}:0",),
        left=(f"{SECOND}:0",),
        top1=top1,
    )


def train_flags(options: argparse.Namespace, data: Path) -> list[str]:
    """The command line of ``train.py``; the user's own flags come last and win."""
    exact = ["--exact"] if options.exact else []  # real data wants --global-batch and --micro-batch with it
    if options.data is not None:
        return ["--data", str(data), *ON_REAL_DATA.split(), *exact, *options.train]
    epochs = SHORT_EPOCHS if options.short else EPOCHS
    return ["--data", str(data), *ON_DIGITS.split(), "--epochs", str(epochs), *exact, *options.train]


def clear(folder: Path) -> None:
    """Make ``folder``, and remove the files of an earlier run, whose checkpoint would be restored."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("events.jsonl", "report.png", "edlrun.log", "horovodrun.log", "hosts", "weights.sha256"):
        (folder / name).unlink(missing_ok=True)


def read_options() -> argparse.Namespace:
    parser = demo_parser(__doc__, "runs/demo")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA") or None, help="[$DATA, else digits]")
    parser.add_argument("--launcher", choices=LAUNCHERS, default=os.environ.get("LAUNCHER") or LAUNCHERS[0],
                        help="[$LAUNCHER, else edlrun]")  # fmt: skip
    parser.add_argument(
        "--exact",
        action="store_true",
        default=os.environ.get("EXACT") == "1",
        help="the same weights for any schedule [EXACT=1]",
    )
    parser.add_argument(
        "--schedule",
        type=int,
        default=os.environ.get("SCHEDULE") or "0",
        help="number of the schedule of faults [$SCHEDULE, else 0]",
    )
    parser.add_argument("train", nargs="*", metavar="-- flags", help="further flags of train.py")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        play(main)
    except (UsageError, PlatformError) as error:
        fail(error)
