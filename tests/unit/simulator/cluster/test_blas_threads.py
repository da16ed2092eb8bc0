"""Fits of small models start no threads, which would wait for each other for most of the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_profiles import write_profile

COUNT = """
import os, sys
from pathlib import Path
from edl_hvd.simulator.cluster.profiles import StepTime, read_application
from edl_hvd.simulator.cluster.throughput_fit import MeasuredStep, fit
before = len(os.listdir("/proc/self/task"))
application = read_application(Path(sys.argv[1]))
if sys.argv[2] == "profile":
    application.step((1, 1, 1), 16)
fit({MeasuredStep(1, 1, 16): StepTime(0.1, 0.01), MeasuredStep(1, 4, 32): StepTime(0.2, 0.05)})
print(len(os.listdir("/proc/self/task")) - before, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core no threads are started anyway")
@pytest.mark.parametrize("first", ["profile", "fit"])
@pytest.mark.parametrize(("chosen", "more"), [(None, 0), ("2", 1)])
def test_scipy_starts_no_threads_unless_asked(tmp_path: Path, first: str, chosen: str | None, more: int) -> None:
    write_profile(tmp_path, "bert")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if chosen:
        variables["OPENBLAS_NUM_THREADS"] = chosen
    words = [sys.executable, "-c", COUNT, str(tmp_path / "bert"), first]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(more), str(chosen)]
