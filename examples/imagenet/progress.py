"""Show and log progress while training: a live bar in a terminal, else a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

import edl_hvd
from edl_hvd import ElasticBatchSampler, State, Step

PLAIN_LINE_EVERY_S = 5.0


class Progress:
    """Progress of the training on the screen, and loss and speed in the event log.

    Every rank has one, and that of rank 0 is shown. Ranks change at a resize, so each update asks for the rank.

    Args:
        state: State of the run.
        batches: Sampler, which knows the position in the epoch.
        optimizer: Optimizer whose learning rate is shown.
        epochs: Number of epochs of the whole run.
        every_steps: Number of optimizer steps between two updates.
    """

    def __init__(
        self,
        state: State,
        batches: ElasticBatchSampler,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        every_steps: int,
    ) -> None:
        self._state = state
        self._batches = batches
        self._optimizer = optimizer
        self._epochs = epochs
        self._every_steps = every_steps
        self._measured: tuple[float, int] | None = None  # time and samples of the last update
        self._next_line_s = 0.0
        self._bar = _bar() if sys.stdout.isatty() else None
        state.on_resize(lambda: self.say(f"training goes on with {_workers()}"))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide()

    def update(self, step: Step) -> None:
        """Show and log what the workers have recorded in a step. Every rank calls it after its loop over the step."""
        if step.number % self._every_steps:
            return
        loss = step.mean("loss")
        learning_rate = self._optimizer.param_groups[0]["lr"] * self._state.learning_rate_factor
        noise = self._state.gradient_noise_scale
        known = {} if noise is None or math.isinf(noise) else {"gradient_noise_scale": noise}
        self._state.report(loss=loss, learning_rate=learning_rate, **known)
        images_per_s = self._images_per_s()
        if images_per_s is not None and edl_hvd.rank() == 0:
            self._show(
                f"{images_per_s:,.0f} images/s · loss {loss:.3f} · learning rate {learning_rate:.4f} · {_workers()}"
            )

    def say(self, text: str) -> None:
        """Print a line on rank 0, once the bar is out of the way. The measurement of speed starts again here."""
        self._hide()
        self._measured = None
        if edl_hvd.rank() == 0:
            print(text, flush=True)

    def _images_per_s(self) -> float | None:
        """Images per second of the whole world since the last call; ``None`` at the first call."""
        now_s, samples = time.monotonic(), self._state.samples
        before, self._measured = self._measured, (now_s, samples)
        return (samples - before[1]) / (now_s - before[0]) if before else None

    def _show(self, text: str) -> None:
        title = f"epoch {self._state.epoch + 1}/{self._epochs}"
        done, total = self._batches.offset, self._batches.epoch_samples()
        if self._bar is not None:
            if not self._bar.tasks:
                self._bar.add_task(title, facts=text)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], description=title, completed=done, total=total, facts=text)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + PLAIN_LINE_EVERY_S
            print(f"{title} · {done / total:4.0%} · {text}", flush=True)

    def _hide(self) -> None:
        if self._bar is not None and self._bar.tasks:
            self._bar.stop()
            self._bar = _bar()


def _workers() -> str:
    return f"{edl_hvd.size()} worker" + ("" if edl_hvd.size() == 1 else "s")


def _bar() -> Bar:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    return Bar(*columns, TextColumn("{task.fields[facts]}"), transient=True)
