"""What this worker is doing right now, for whoever watches it.

The main thread enters phases; another thread reads them, several times a second. What goes on inside a phase of the
script's own is recognised from outside, without help of the script: a model in evaluation mode is validated, a stack
that leads through a compiler compiles, one that leads through ``torch.save`` writes.

A **wait** is a call that ends only when every member of the world has made it. All members make the same ones in the
same order, so their numbers say who waits for whom.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import getpid
from types import FrameType
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.events import Straggler

# Phases whose length repeats itself from batch to batch.
_REPEATED = frozenset(("compute", "input", "commit"))
_FORGET = 0.998
# Per phase: what was slow once counts half some 350 phases or 90 batches later, and the first batches not for ever.
_RECOGNISE_AFTER_S = 1.0
# Looking at every stack four times a second would cost more than it tells; nobody is judged by a second.

_COMPILERS = frozenset(
    (
        "torch._dynamo.convert_frame",
        "torch._inductor.compile_fx",
        "torch.utils.cpp_extension",
        "triton.compiler.compiler",
    )
)
# Modules that run while something is compiled, and not while the result is used.
_WRITERS = frozenset(("torch.serialization", "safetensors.torch", "torch.distributed.checkpoint.state_dict_saver"))


class Progress:
    """Written by the main thread, read by others.

    Attributes:
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint known to be complete; -1 for none.
        phase: "start", "join", "script" (the elastic function, outside ``state.batches``), "input", "compute",
            "collective" (it waits for the others), "commit", "checkpoint", or "end".
        waits: Waits that it has come through in the present world.
        steps: Optimizer steps that this process took part in.
        batches: Micro-batches that it has begun to compute.
        is_validating: Tells whether a model is in evaluation mode; any thread.
        stragglers: What the driver has found out about this world, to be written down.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.step = self.samples = 0
        self.saved_step = -1
        self.phase = "start"
        self.waits = self.steps = self.batches = 0
        self.is_validating: Callable[[], bool] = lambda: False
        self.stragglers: deque[Straggler] = deque()
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._compute_s = self._slowest_s = 0.0
        # Of the present phase: it was recognised as something else, at this moment.
        self._recognised_s: float | None = None

    def enter(self, phase: str) -> str:
        """Begin a phase; the one before is returned."""
        before, now_s = self.phase, self._clock.monotonic_s()
        if self._recognised_s is not None:
            self._recognised_s = None  # it says nothing about the phases to come
        elif before in _REPEATED:
            lasted_s = now_s - self._since_s
            self._slowest_s = max(lasted_s, self._slowest_s * _FORGET)
            if before == "compute":
                self._compute_s += lasted_s
        self.phase, self._since_s = phase, now_s
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of a block, or of a function that this decorates; afterwards it is the one before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Of a block that ends only when every member of the world has come to it."""
        before = self.enter("collective")
        try:
            yield
            self.waits += 1
        finally:
            self.enter(before)

    def beat(self, generation: int) -> dict[str, Any]:
        """The fields of a beat, see ``driver/control.py``. One thread."""
        phase, since_s, now_s = self.phase, self._since_s, self._clock.monotonic_s()
        if phase == "compute" and now_s - since_s > _RECOGNISE_AFTER_S:
            recognised = self._recognise(now_s)
            if recognised is not None:
                phase = recognised
            elif self._recognised_s is not None:
                since_s = max(since_s, self._recognised_s)  # what came after it has lasted since then
        return {
            "generation": generation, "pid": getpid(), "step": self.step, "samples": self.samples,
            "saved_step": self.saved_step, "phase": phase, "phase_s": now_s - since_s, "compute_s": self._compute_s,
            "waits": self.waits, "steps": self.steps, "batches": self.batches, "slowest_s": self._slowest_s,
        }  # fmt: skip

    def _recognise(self, now_s: float) -> str | None:
        phase = "validation" if self.is_validating() else recognise(sys._current_frames(), _main_thread())
        if phase is not None:
            self._recognised_s = now_s
        return phase


def recognise(frames: Mapping[int, FrameType], main_thread: int) -> str | None:
    """What the threads with these innermost frames are at, if it is something that may take long.

    Returns:
        "compile" where any of them compiles, as the thread that runs ``backward()`` may; "checkpoint" where the main
        one writes.
    """
    for thread, innermost in frames.items():
        frame: FrameType | None = innermost
        while frame is not None:
            module = frame.f_globals.get("__name__")
            if module in _COMPILERS:
                return "compile"
            if module in _WRITERS and thread == main_thread:
                return "checkpoint"
            frame = frame.f_back
    return None


def _main_thread() -> int:
    return threading.main_thread().ident or 0


progress = Progress()
"""Of this process."""
