"""Workers whose teachers have different models learn from the same one, though their script does not ask for that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import Fleet, Scaled, fleet
from test_distill import environment, lines, write_hosts
from waiting import soon, until

HERE = Path(__file__).parent
SCRIPT = HERE / "distill_models_script.py"
OTHER = "127.0.0.1"
EPOCHS = 3
pytestmark = pytest.mark.distill


class StudentJob:
    """Two hosts with a list of two teachers each, of which the first run."""

    def __init__(self, folder: Path, teachers: Fleet) -> None:
        self.folder, self.teachers = folder, teachers
        for host in ("localhost", OTHER):
            (folder / host).mkdir()
            (folder / host / "teachers.txt").write_text("localhost:2\n")
        teachers.start(Scaled(1), 0)
        teachers.start(Scaled(2), 2)

    @property
    def text(self) -> str:
        return (self.folder / "output.txt").read_text()

    def start(self, launcher: str, workers: int, epochs: int) -> subprocess.Popen[bytes]:
        words = [str(Path(sys.executable).with_name(launcher)), "-np", str(workers), "--min-np", "1", "--max-np", "2"]
        if launcher == "edlrun":
            words += ["--discover", f"file:{self.folder / 'hosts'}"]
        else:
            script = self.folder / "discover.sh"
            script.write_text(f"#!/bin/sh\ncat {self.folder / 'hosts'}\n")
            script.chmod(0o755)
            words += ["--host-discovery-script", str(script), "--network-interfaces", "lo"]
        words += [sys.executable, str(SCRIPT), str(self.folder), str(self.teachers.port), str(epochs)]
        variables = {**environment(self.folder), "EDL_HVD_TEACHERS": "file:teachers.txt"}
        with open(self.folder / "output.txt", "wb") as output:
            return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables)


def finish(job: subprocess.Popen[bytes], students: StudentJob) -> None:
    try:
        assert soon(job) == 0, students.text[-4000:]
    finally:
        if job.poll() is None:
            job.terminate()
            soon(job)


@pytest.mark.parametrize("launcher", ["edlrun", "horovodrun"])
def test_workers_that_meet_different_models_go_back_and_learn_from_one(tmp_path, launcher):
    write_hosts(tmp_path, "localhost:1", f"{OTHER}:1")
    with fleet(tmp_path) as teachers:
        students = StudentJob(tmp_path, teachers)
        job = students.start(launcher, 2, EPOCHS)
        try:
            until(lambda: "teachers with different models" in students.text or job.poll() is not None)
            found = re.search(r"file:teachers.txt has model-(\d) and model-\d;", students.text)
            assert found is not None, students.text[-4000:]
            used = int(found[1])
            teachers.start(Scaled(used), 1 if used == 2 else 3)  # for the worker that had met the other one
        finally:
            finish(job, students)
    (tmp_path / "alone" / "localhost").mkdir(parents=True)
    words = [sys.executable, str(SCRIPT), str(tmp_path / "alone"), str(used), str(EPOCHS)]
    subprocess.run(words, check=True, env=environment(tmp_path / "alone"))
    assert {tuple(line["scales"]) for line in lines(tmp_path) if line["generation"] == 1} == {(1,), (2,)}
    assert {tuple(line["scales"]) for line in lines(tmp_path) if line["generation"] != 1} == {(used,)}
    assert {line["size"] for line in lines(tmp_path)} == {2}
    assert (tmp_path / "digest").read_text() == (tmp_path / "alone" / "digest").read_text()


def test_a_newcomer_learns_from_the_model_of_the_others(tmp_path):
    write_hosts(tmp_path, "localhost:1")
    with fleet(tmp_path) as teachers:
        students = StudentJob(tmp_path, teachers)
        job = students.start("edlrun", 1, 0)
        try:
            until(lambda: lines(tmp_path) or job.poll() is not None)
            write_hosts(tmp_path, "localhost:1", f"{OTHER}:1")
            until(lambda: "is not used: its model has fingerprint model-2" in students.text or job.poll() is not None)
            teachers.start(Scaled(1), 3)
            until(lambda: any(line["size"] == 2 for line in lines(tmp_path)) or job.poll() is not None)
            (tmp_path / "enough").touch()
        finally:
            finish(job, students)
    assert {tuple(line["scales"]) for line in lines(tmp_path)} == {(1,)}
    assert "teachers with different models" not in students.text
