"""The text example learns what the plain script learns, and far more than from its labels alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleet import free_port
from waiting import soon

from edl_hvd.events import read_events

pytestmark = pytest.mark.distill

EXAMPLE = Path(__file__).parents[3] / "examples" / "distill"
PROGRAMS = Path(sys.executable).parent
EPOCHS = "8"
ADDRESSES = ("127.0.0.2", "127.0.0.3")
VARIABLES = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *words: str, **variables: str) -> tuple[list[float], float]:
    """The losses of the epochs, and the accuracy."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env={**VARIABLES, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"accuracy ([0-9.]+)", done.stdout)
    assert accuracy is not None
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)], float(accuracy[1])


def test_a_teacher_without_torch_is_worth_twelve_points(tmp_path):
    """Plain, with the labels alone; plain, with the teacher; two workers and two hosts with a teacher each, by token.

    The commands are those of the document for three hosts; hosts are addresses of this machine.
    """
    script = [sys.executable, str(EXAMPLE / "text_plain.py"), "--epochs", EPOCHS]
    run(tmp_path, sys.executable, str(EXAMPLE / "text.py"), "--epochs", "1")  # the document's way to make the files
    _, labels_only = run(tmp_path, *script, "--labels-only")
    plain, plain_accuracy = run(tmp_path, *script)
    port = free_port()
    (tmp_path / "token.txt").write_text("the-token-of-this-test")
    (tmp_path / "teachers.txt").write_text("".join(f"{address}:1\n" for address in ADDRESSES))
    with ExitStack() as stack:
        for address in ADDRESSES:
            words = [str(PROGRAMS / "edl-hvd"), "teach", f"{EXAMPLE}/text.py:build", "--token-file", "token.txt",
                     "--listen", address, "--port", str(port)]  # fmt: skip
            teach = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=VARIABLES)
            )
            stack.callback(soon, teach)
            stack.callback(teach.terminate)
            assert teach.stdout is not None
            assert teach.stdout.readline() == f"TextTeacher answers at {address}:{port}\n"
        variables = {"EDL_HVD_TEACHERS_TOKEN_FILE": "token.txt", "EDL_HVD_EVENTS": "events.jsonl"}
        shown = subprocess.run(
            [str(PROGRAMS / "edl-hvd"), "teachers", "file:teachers.txt", "--port", str(port)],
            cwd=tmp_path, capture_output=True, text=True, env={**VARIABLES, **variables},
        )  # fmt: skip
        assert "2 of 2 teachers" in shown.stdout, shown.stdout + shown.stderr
        service, accuracy = run(
            tmp_path, str(PROGRAMS / "edlrun"), "-np", "2", "--min-np", "1", "--teachers", "file:teachers.txt",
            sys.executable, str(EXAMPLE / "text.py"), "--epochs", EPOCHS, "--port", str(port), **variables,
        )  # fmt: skip
    joined = [
        event["teacher"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_joined"
    ]
    assert set(joined) == {f"{address}:{port}" for address in ADDRESSES}
    assert len(plain) == int(EPOCHS)
    assert service == pytest.approx(plain, rel=1e-3)
    assert accuracy == pytest.approx(plain_accuracy, abs=0.01)
    assert min(accuracy, plain_accuracy) >= labels_only + 0.12, "points that the teacher's answers are worth"
