"""What a worker with teachers tells: that it waits for one, which is not phase "input", and where its time goes."""

from __future__ import annotations

import sys
import threading
import types
from types import FrameType

import pytest
from waiting import soon

from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.distill.service import Service
from edl_hvd.distill.stages import Stages
from edl_hvd.stage_times import StageTimes
from edl_hvd.teacher_counts import TeacherCounts, combine
from edl_hvd.worker.progress import Progress, awaits_teacher


def test_waiting_for_an_answer_is_recognised_by_the_stack():
    """The function is the loader's own; what it asks is a stand-in that looks at the stack."""
    seen: list[bool] = []

    def look() -> tuple[()]:
        frame: FrameType | None = sys._getframe()
        seen.append(awaits_teacher(frame))
        return ()

    stand_in = types.SimpleNamespace(calling=types.SimpleNamespace(changed=threading.Condition()))
    Service.wait_for_answer(stand_in, look, "a test", str)  # type: ignore[arg-type]
    assert seen == [True]
    assert not awaits_teacher(sys._getframe())


@pytest.mark.parametrize("phase", ["input", "compute"])
def test_the_beat_of_a_worker_that_waits_for_a_teacher_says_so(phase):
    """A loader waits in phase "input"; a script that has asked by itself waits while it computes."""

    class Later:
        """A clock by which the phase has lasted."""

        now_s = 0.0

        def wall_s(self) -> float:
            return SYSTEM_CLOCK.wall_s()

        def monotonic_s(self) -> float:
            return self.now_s

        def sleep(self, duration_s: float) -> None:
            SYSTEM_CLOCK.sleep(duration_s)

    clock, phases = Later(), []
    progress = Progress(clock)
    progress.enter(phase)
    clock.now_s = 5.0

    def look() -> tuple[()]:
        # As the driver's line does, in another thread.
        beats = threading.Thread(target=lambda: phases.append(progress.beat(1).phase))
        beats.start()
        soon(beats)
        return ()

    stand_in = types.SimpleNamespace(calling=types.SimpleNamespace(changed=threading.Condition()))
    Service.wait_for_answer(stand_in, look, "a test", str)  # type: ignore[arg-type]
    phases.append(progress.beat(1).phase)
    assert phases == ["teachers", phase]


def test_a_pass_without_an_answer_of_its_own_has_no_times_and_lowers_no_mean() -> None:
    """Answers that it has taken over from an earlier pass do not count; its zeros would be part of the job's means."""
    stages = Stages()
    stages.read(1, 0.0)
    stages.consumed(1, 1.0)
    assert stages.times is None
    stages.read(2, 1.0)
    stages.given(2, 1.5)
    stages.answered(2, waiting_s=0.1, compute_s=0.2, now_s=2.0)
    assert stages.times == StageTimes(queued_s=0.5, wire_s=0.2, waiting_s=0.1, compute_s=0.2)
    without, with_one = (TeacherCounts(1, 1.0, 1, 1, 0.0, times) for times in (None, stages.times))
    together = combine([without, with_one])
    assert together is not None
    assert together.stages == stages.times
