"""What this worker is doing right now, for the threads that report it.

The main thread enters phases; another thread reads them, several times a second. What goes on inside a phase of the
script's own is recognised from outside, without help of the script: a model in evaluation mode is validated, a stack
that leads through a compiler compiles, one that leads through ``torch.save`` writes.

A **wait** is a call that ends only when every member of the world has made it. All members make the same ones in the
same order, so their numbers say who waits for whom.
"""

from __future__ import annotations

import gc
import re
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import getpid
from pathlib import PurePath
from types import FrameType

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.protocol import Beat, StragglerFound, WorkerPhase
from edl_hvd.teacher_counts import answer_counts
from edl_hvd.work_report import WorkReport

# Phases whose length repeats itself from batch to batch.
_REPEATED = frozenset(("compute", "input", "commit"))
_DECAY = 0.998
# Per phase: what was slow once counts half some 350 phases or 90 batches later, and the first batches not for ever.
_RECOGNISE_AFTER_S = 1.0
# Looking at every stack four times a second would cost more than it tells; a second decides nothing.

_COMPILERS = frozenset(
    (
        "torch._dynamo.convert_frame",
        "torch._inductor.compile_fx",
        "torch.utils.cpp_extension",
        "triton.compiler.compiler",
    )
)
# Modules that run while something is compiled, and not while the result is used.
_LIBRARIES = re.compile(
    "|".join(re.escape(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib"))
    + "|.*/(?:site|dist)-packages/|<frozen"
)
# Also where another environment's packages are used, as with --system-site-packages.
_LIBRARY_NAMES = frozenset(("horovod", "numpy", "torch", "torchvision"))
# Wherever they lie: some are used from the folder that they were built in.
_OWN = __name__.partition(".")[0]
_MOST_FRAMES = 40
_LONGEST_FRAME = 200
# Characters. Together with the above well below the longest line that the driver reads, with room for its quotes.
LONGEST_NAME = 200
# Of a collective.
_TEACHERS = ("edl_hvd.distill.service", "wait_for_answer")
# Module and function in which a script waits for a teacher; how long that takes says nothing about this worker.
_WRITERS = frozenset(("torch.serialization", "safetensors.torch", "torch.distributed.checkpoint.state_dict_saver"))

_COLLECTING = threading.Lock()
# Held by who switches garbage collection off.


@dataclass(frozen=True)
class StackPlace:
    """Where a thread stands: line and function of the script, empty if there is none, and its stack."""

    place: str
    stack: str


class Progress:
    """Written by the main thread, read by others.

    Attributes:
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint known to be complete; -1 for none.
        restored_step: Step of the checkpoint that this process has restored; -1 for none.
        phase: "start", "join", "script" (the elastic function, outside ``state.batches``), "input", "compute",
            "collective" (it waits for the others), "commit", "checkpoint", or "end".
        waits: Waits that it has come through in the present world.
        collective: Name of the collective that it waits for; empty while it waits for none, or nobody knows.
        steps: Optimizer steps that this process took part in.
        batches: Micro-batches that it has begun to compute.
        is_validating: Function for whether a model is in evaluation mode; called in any thread.
        work: How the job divides its batch; ``None`` where no sampler of the state deals it.
        total_samples: Samples of the whole run when the epochs of ``state.epochs`` are over; ``None``: unknown.
        stragglers: Stragglers that the driver has found in this world, for rank 0 to write down.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.step = self.samples = 0
        self.saved_step = self.restored_step = -1
        self.phase: WorkerPhase = "start"
        self.waits = self.steps = self.batches = 0
        self.collective = ""
        self._waiter = 0  # the thread that waits
        self.is_validating: Callable[[], bool] = lambda: False
        self.work: WorkReport | None = None
        self.total_samples: int | None = None
        self.stragglers: deque[StragglerFound] = deque()
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._compute_s = self._slowest_s = 0.0
        # Of the present phase: it was recognised as something else, at this moment.
        self._recognised_s: float | None = None

    def enter(self, phase: WorkerPhase) -> WorkerPhase:
        """Begin a phase.

        Returns:
            The phase before.
        """
        before, now_s = self.phase, self._clock.monotonic_s()
        if self._recognised_s is not None:
            self._recognised_s = None  # it says nothing about the phases to come
        elif before in _REPEATED:
            lasted_s = now_s - self._since_s
            self._slowest_s = max(lasted_s, self._slowest_s * _DECAY)
            if before == "compute":
                self._compute_s += lasted_s
        self.phase, self._since_s = phase, now_s
        return before

    @contextmanager
    def during(self, phase: WorkerPhase) -> Iterator[None]:
        """Name the phase of a block, or of a function that this decorates; afterwards it is the one before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Phase "collective" of a block that ends only when every member of the world has come to it."""
        before = self.enter("collective")
        self._waiter = threading.get_ident()
        try:
            yield
            self.waits += 1
        finally:
            self.collective = ""
            self.enter(before)

    def where(self) -> StackPlace:
        """Where the thread that waits, or else the main one, stands."""
        frames = current_frames()
        innermost = frames.get(self._waiter) if self.phase == "collective" else None
        innermost = innermost or frames.get(_main_thread())
        place = place_of(innermost)
        # On a GPU backward() runs in a thread of torch's own, in which the script does not show.
        return StackPlace(place or place_of(frames.get(_main_thread())), stack_of(innermost))

    def beat(self, generation: int) -> Beat:
        """The beat of a worker in the world of this generation. One thread."""
        phase, since_s, now_s = self.phase, self._since_s, self._clock.monotonic_s()
        if phase in ("compute", "input") and now_s - since_s > _RECOGNISE_AFTER_S:
            recognised = self._recognise(phase, now_s)
            if recognised is not None:
                phase = recognised
            elif self._recognised_s is not None:
                since_s = max(since_s, self._recognised_s)  # what came after it has lasted since then
        return Beat(
            generation, pid=getpid(), step=self.step, samples=self.samples, saved_step=self.saved_step, phase=phase,
            phase_s=now_s - since_s, compute_s=self._compute_s, waits=self.waits, steps=self.steps,
            batches=self.batches, slowest_s=self._slowest_s,
            collective=self.collective if phase == "collective" else "", teachers=answer_counts.look(),
            restored_step=self.restored_step, work=self._work(),
        )  # fmt: skip

    def _work(self) -> WorkReport | None:
        work, total = self.work, self.total_samples
        return work if work is None or total is None else replace(work, samples_left=max(0, total - self.samples))

    def _recognise(self, phase: WorkerPhase, now_s: float) -> WorkerPhase | None:
        frames = current_frames()
        recognised: WorkerPhase | None
        if awaits_teacher(frames.get(_main_thread())):
            recognised = "teachers"
        elif phase == "input":
            recognised = None
        else:
            recognised = "validation" if self.is_validating() else recognise(frames, _main_thread())
        if recognised is not None:
            self._recognised_s = now_s
        return recognised


def current_frames() -> Mapping[int, FrameType]:
    """The innermost frame of each thread, by its identifier; of this one, the caller's.

    Python before 3.12 holds the lock of its list of threads meanwhile, and hangs for ever where a garbage collection
    frees a ``threading.local`` then, which takes that lock as well (python/cpython#106883). So none happens here.
    """
    with _COLLECTING:  # else one thread finds it switched off by another, and it stays so
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return {**sys._current_frames(), threading.get_ident(): sys._getframe(1)}
        finally:
            if is_collecting:
                gc.enable()


def recognise(frames: Mapping[int, FrameType], main_thread: int) -> WorkerPhase | None:
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


def awaits_teacher(innermost: FrameType | None) -> bool:
    """Whether a stack leads through a loader that waits for a teacher's answer."""
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == _TEACHERS for frame in _frames(innermost))


def place_of(innermost: FrameType | None) -> str:
    """The innermost line of the script's own on a stack, such as ``train.py:71 in augment``; empty if there is none."""
    for frame in _frames(innermost):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name != _OWN and name not in _LIBRARY_NAMES and not _LIBRARIES.match(frame.f_code.co_filename):
            return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def stack_of(innermost: FrameType | None) -> str:
    """A stack as Python's fault handler writes it, the innermost frame first. Reads no source: its disk may hang."""
    lines = [
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'[:_LONGEST_FRAME]
        for frame in _frames(innermost)
    ]
    left_out = [f"  … {len(lines) - _MOST_FRAMES} more"] if len(lines) > _MOST_FRAMES else []
    return "\n".join(lines[:_MOST_FRAMES] + left_out)


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _main_thread() -> int:
    return threading.main_thread().ident or 0


progress = Progress()
"""The progress of this process."""
