"""The example learns what the plain script learns, whether the teacher is in its process or a service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet import fleet, free_port
from waiting import soon

pytestmark = pytest.mark.distill

EXAMPLE = Path(__file__).parents[3] / "examples" / "distill"


def run(
    script: str, folder: Path, *words: str, strike: Callable[[], None] = lambda: None, **variables: str
) -> tuple[list[float], float]:
    """The losses of the epochs, and the accuracy; ``strike`` is called after the first epoch."""
    job = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLE / script), *words], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    assert job.stdout is not None
    output = ""
    for line in job.stdout:
        if "loss" in line and "loss" not in output:
            strike()
        output += line
    job.stdout.close()
    assert soon(job) == 0, output
    accuracy = re.search(r"accuracy ([0-9.]+)", output)
    assert accuracy is not None
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)], float(accuracy[1])


def test_with_the_service_the_losses_are_those_of_plain_pytorch(tmp_path, monkeypatch):
    """Also when three of four teachers are killed in mid-run."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from common import TEACHER, train_teacher

    model = train_teacher(tmp_path / TEACHER, epochs=1)
    plain, plain_accuracy = run("plain.py", tmp_path, "--epochs", "5")
    local, local_accuracy = run("digits.py", tmp_path, "--epochs", "5")
    with fleet(tmp_path) as teachers:
        for _ in range(4):
            teachers.start(model)

        def strike() -> None:
            for number in (0, 1, 3):
                teachers.kill(number)

        source, port = {"EDL_HVD_TEACHERS": teachers.source}, str(teachers.port)
        service, accuracy = run("digits.py", tmp_path, "--epochs", "5", "--port", port, strike=strike, **source)
        assert not teachers.processes[0].is_alive()
    assert len(plain) == 5
    assert local == pytest.approx(plain, rel=2e-5)
    assert service == pytest.approx(plain, rel=2e-5)
    assert accuracy == pytest.approx(plain_accuracy, abs=0.005)
    assert local_accuracy == pytest.approx(accuracy, abs=0.005)


def test_the_commands_of_the_document(tmp_path, monkeypatch):
    """Two workers under edlrun, two teachers of ``edl-hvd teach``; other ports than the document's."""
    programs = str(Path(sys.executable).parent)
    port = free_port(2)
    variables = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from common import TEACHER, train_teacher

    train_teacher(tmp_path / TEACHER, epochs=1)
    (tmp_path / "teachers.txt").write_text("localhost:2\n")
    words = [f"{programs}/edl-hvd", "teach", f"{EXAMPLE}/digits.py:build", "--devices", "cpu,cpu", "--port", str(port)]
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=variables)
    assert teach.stdout is not None
    try:
        for _ in range(2):
            assert teach.stdout.readline().startswith("Average answers at 127.0.0.1:")
        words = [f"{programs}/edlrun", "-np", "2", "--min-np", "1", "--teachers", "file:teachers.txt", sys.executable,
                 f"{EXAMPLE}/digits.py", "--epochs", "2", "--port", str(port)]  # fmt: skip
        job = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=variables)
        assert job.returncode == 0, job.stdout + job.stderr
        assert re.search(r"epoch 2: loss [0-9.]+, workers [12]", job.stdout)
        words = [f"{programs}/edl-hvd", "teachers", "file:teachers.txt", "--port", str(port)]
        shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=variables)
        assert shown.returncode == 0
        assert "2 of 2 teachers" in shown.stdout
    finally:
        teach.terminate()
        assert soon(teach) == 0
        teach.stdout.close()
