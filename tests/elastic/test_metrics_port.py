"""A job whose ``edlrun`` serves metrics, as Prometheus reads them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from harness import REPOSITORY
from prometheus_client.parser import text_string_to_metric_families
from waiting import LONG_S

from edl_hvd.job_report import JobReport, read_report

EDLRUN = str(Path(sys.executable).with_name("edlrun"))


def read(url: str) -> dict[str, float]:
    text = urlopen(url).read().decode()
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def serving(folder: Path, flag: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job of two workers, which has to end well, and the URL that it serves by this flag."""
    job = subprocess.Popen(
        [EDLRUN, "-np", "2", flag, "0", "--job-dir", str(folder / "job"), sys.executable,
         str(REPOSITORY / "examples" / "minimal.py")],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        line = job.stdout.readline()
        found = re.search(r"(?:metrics are|report is) at (http://127\.0\.0\.1:\d+/\w+)", line)
        assert found is not None, line
        yield job, found[1]
        job.stdout.read()
        assert job.wait(LONG_S) == 0
    finally:
        job.kill()
        job.communicate()


def test_prometheus_sees_a_job_train(tmp_path):
    with serving(tmp_path, "--metrics-port") as (job, url):
        steps = set()
        deadline_s = time.monotonic() + LONG_S
        while len(steps) < 3:
            assert time.monotonic() < deadline_s
            assert job.poll() is None
            seen = read(url)
            if seen["edl_hvd_step"] > 0:
                assert seen["edl_hvd_statetraining"] == 1
                assert seen["edl_hvd_workersmember"] == seen["edl_hvd_world_size"] == 2
                steps.add(seen["edl_hvd_step"])
        assert seen["edl_hvd_work_left_samples"] > 0


def test_a_job_reports_its_speed_its_curve_and_what_is_left(tmp_path):
    with serving(tmp_path, "--status-port") as (job, url):
        deadline_s = time.monotonic() + LONG_S
        report = JobReport()
        while not (report.sizes and report.left_s):
            assert time.monotonic() < deadline_s
            assert job.poll() is None
            report = read_report(urlopen(url).read().decode())
        assert (report.state, report.workers) == ("training", 2)
        assert 2 in report.sizes
        assert report.step > 0
        assert report.left is not None
        assert 0 < report.left < 20 * 2048


def test_a_port_that_cannot_be_had_is_refused_before_anything_starts(tmp_path):
    done = subprocess.run(
        [EDLRUN, "-np", "1", "--metrics-port", "x:y", sys.executable, "-c", "print('started')"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'x:y' is no place to serve at; expected PORT or ADDRESS:PORT" in done.stderr
    assert "started" not in done.stdout
