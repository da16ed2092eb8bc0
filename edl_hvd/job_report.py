"""What a job tells whoever shares slots out among jobs: how far it is, how it scales, what is left.

``edlrun --status-port`` serves it as JSON at ``/status``. The one who reads it may be of another version: what it does
not know it leaves out, and what is missing has its default.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from edl_hvd.errors import UsageError
from edl_hvd.hosts import shown
from edl_hvd.json_values import read_fields
from edl_hvd.timings import Timing

PATH = "/status"
_MOST_SIZES, _MOST_WORKERS = 1000, 1_000_000
_LEAST, _MOST = 1e-9, 1e15
# A number beyond these is no measurement, and would spoil the plan of all jobs.


@dataclass(frozen=True)
class JobReport:
    """A job at one moment.

    Attributes:
        state: As in the job's status, such as "training".
        workers: Members of the present world.
        step: Optimizer steps that are complete; -1 before it is known.
        samples_per_s: Samples per second; ``None`` while nothing is trained.
        left_s: Seconds that the rest of the work takes with these workers; ``None``: not known.
        sizes: Numbers of workers of which the goodput is known, rising; empty before it was measured.
        goodput: Goodput with each of them, more than 0.
        left: Work left, in units of goodput times seconds; ``None``: not known.
        change_s: Seconds that another number of workers costs; ``None`` before there was a change.
        timings: How long its steps took, for jobs of its family.

    Raises:
        UsageError: The curve is none, or a number is out of bounds.
    """

    state: str = ""
    workers: int = 0
    step: int = -1
    samples_per_s: float | None = None
    left_s: float | None = None
    sizes: tuple[int, ...] = ()
    goodput: tuple[float, ...] = ()
    left: float | None = None
    change_s: float | None = None
    timings: tuple[Timing, ...] = ()

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip((0, *self.sizes), self.sizes, strict=False))
        usable = all(_LEAST <= value <= _MOST for value in self.goodput) and max(self.sizes, default=0) <= _MOST_WORKERS
        if len(self.sizes) != len(self.goodput) or len(self.sizes) > _MOST_SIZES or not rising or not usable:
            raise UsageError(
                f"a report has sizes {shown(list(self.sizes))} and goodput {shown(list(self.goodput))}; expected "
                f"{_MOST_SIZES} sizes at most, of 1 to {_MOST_WORKERS} workers, that rise, and as many values from "
                f"{_LEAST:g} to {_MOST:g}"
            )
        for name in ("samples_per_s", "left_s", "left", "change_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST:
                raise UsageError(f"a report has a {name} of {value:g}; expected 0 to {_MOST:g}")
        if len(self.timings) > _MOST_SIZES or not all(timing.is_usable for timing in self.timings):
            raise UsageError(
                f"a report has timings {shown([timing.as_list() for timing in self.timings])}; expected {_MOST_SIZES} "
                "at most, with counts of at least 1 and seconds above 0"
            )
        if not (0 <= self.workers <= _MOST_WORKERS and -1 <= self.step <= _MOST):
            raise UsageError(
                f"a report has {shown(self.workers)} workers at step {shown(self.step)}; expected 0 to {_MOST_WORKERS} "
                f"workers, and a step of -1 to {_MOST:g}"
            )

    def to_json(self) -> str:
        """The text that :func:`read_report` reads."""
        return json.dumps(asdict(self))


def read_report(text: str) -> JobReport:
    """Read what a job has said.

    >>> read_report('{"step": 7, "colour": "red"}').step
    7

    Raises:
        UsageError: It is no report.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a job's report is no JSON: {error}") from None
    known = {field.name for field in fields(JobReport)}
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if name in known}
    return read_fields(JobReport, found)
