"""Which measurements of a job are worth a line in the fleet's history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl_hvd.driver.measurements import WorkStatus
from edl_hvd.fleet.keeper import _says_more
from edl_hvd.fleet.state import FleetJob, JobSpec
from edl_hvd.planning.values import Curve
from edl_hvd.timings import Timing

CURVE = Curve((1, 2), (100.0, 190.0))
JOB = FleetJob(JobSpec(name="one", command=("python",), folder="/", least=1, most=2), 0.0)
KNOWN = replace(JOB, curve=CURVE, left=1000.0, change_s=0.3)

STEPS = (Timing(1, 8, 1, 0.1),)
ALIKE = replace(KNOWN, spec=replace(KNOWN.spec, family="resnet50"))


@pytest.mark.parametrize(
    ("job", "work", "expected"),
    [
        (JOB, WorkStatus(), False),
        (JOB, WorkStatus(CURVE), True),
        (JOB, WorkStatus(left=1000.0), True),
        (KNOWN, WorkStatus(CURVE, 1000.0, 0.3), False),
        (KNOWN, WorkStatus(Curve((1, 2), (102.0, 187.0)), 960.0, 0.31), False),
        (KNOWN, WorkStatus(Curve((1, 2), (100.0, 170.0)), 1000.0, 0.3), True),
        (KNOWN, WorkStatus(Curve((1, 2, 4), (100.0, 190.0, 300.0)), 1000.0, 0.3), True),
        (KNOWN, WorkStatus(CURVE, 940.0, 0.3), True),
        (replace(KNOWN, change_s=None), WorkStatus(CURVE, 1000.0, 0.3), True),
        (replace(KNOWN, left=0.0), WorkStatus(CURVE, 0.0, 0.3), False),
        (replace(KNOWN, left=10.0), WorkStatus(CURVE, 0.0, 0.3), True),
        (KNOWN, WorkStatus(CURVE, 1000.0, 0.3, STEPS), False),
        (ALIKE, WorkStatus(CURVE, 1000.0, 0.3, STEPS), True),
        (replace(ALIKE, timings=STEPS), WorkStatus(CURVE, 1000.0, 0.3, STEPS), False),
    ],
)
def test_what_differs_by_more_than_a_twentieth_is_news(job: FleetJob, work: WorkStatus, expected: bool) -> None:
    assert _says_more(work, job) is expected


def test_a_job_of_a_month_tells_what_is_left_some_hundred_times() -> None:
    """Each time is a transaction and a line of history that stays."""
    job, told, left = KNOWN, 0, 30 * 86_400.0 * 1000
    for _ in range(30 * 86_400 // 5):
        left = max(0.0, left - 5 * 1000)
        if _says_more(WorkStatus(CURVE, left, 0.3), job):
            job, told = replace(job, left=left), told + 1
    assert 100 < told < 400
    assert job.left == 0.0
