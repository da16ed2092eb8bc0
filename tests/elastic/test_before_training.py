"""Before there is a world, under ``edlrun``: what a worker is told, and Horovod started by the script itself."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EDLRUN = str(Path(sys.executable).with_name("edlrun"))


def run(workers: int, script: str, *words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    command = [EDLRUN, "-np", str(workers), "--min-np", "1", "-H", f"localhost:{workers}"]
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run([*command, sys.executable, str(HERE / script), *words], env=environment, timeout=240,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout


def test_a_job_has_one_rank_0_before_it_trains_and_a_replacement_is_never_another(tmp_path):
    code, output = run(3, "assignment_script.py", str(tmp_path / "died"))
    assert code == 0, output
    assigned = [tuple(map(int, found)) for found in re.findall(r"assigned (\d) of (\d), (\d) on", output)]
    assert sorted(assigned[:3]) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)], output
    assert assigned[3:] == [(2, 3, 3)], output
    assert sorted(re.findall(r"ended as (\d) of 3", output)) == ["0", "1", "2"], output


@pytest.mark.parametrize("where", ["before", "after"])
def test_horovod_that_the_script_started_itself_ends_the_job_with_what_to_do(where):
    code, output = run(2, "own_horovod_script.py", where)
    assert code == 1, output
    assert "cannot be trained: UsageError: this script has started Horovod by itself" in output, output
    assert output.count("Traceback") <= 2, "nobody was tried again"
    assert "SIGABRT" not in output


def test_a_script_that_only_knows_horovod_ends_the_job_with_what_to_do():
    code, output = run(2, "own_horovod_script.py", "instead")
    assert code == 1, output
    assert "ended with exit code 0 without a call of its training function; under edlrun a script calls" in output


def test_a_command_that_is_no_training_at_all_is_started_once_and_told_so(tmp_path):
    command = [sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", "2", "hostname"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert len([line for line in ended.stdout.splitlines() if socket.gethostname() in line]) == 2, ended.stdout
    [said] = ended.stderr.splitlines()
    assert "ended with exit code 0 without a call of its training function" in said
    assert "function decorated with @edl_hvd.elastic" in said


def test_a_second_call_of_an_elastic_function_ends_the_job_with_what_to_do():
    code, output = run(2, "second_call_script.py")
    assert code == 1, output
    assert "that the job has to end: UsageError: an elastic function was called after one had returned" in output
    assert "fold 1 is trained" not in output
