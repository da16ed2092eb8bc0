"""What a script's end shows of an error that nobody caught: one sentence, and for the user's own mistakes the line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from edl_hvd import errors

_ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EdlHvdError)]

_RAISING = """
import importlib, sys, types
sys.path.insert(0, {folder!r})
from edl_hvd.worker.uncaught import shorten_tracebacks
from edl_hvd import errors
shorten_tracebacks()
shorten_tracebacks()

def train():
    try:
        raise ValueError("what another library said")
    except ValueError as cause:
        raise errors.{kind}("cannot do that; expected this, so do the other") from cause

train()
"""

_REAL = """
import edl_hvd, torch
edl_hvd.init()
model = torch.nn.Linear(2, 1)
state = edl_hvd.State(model=model)

@edl_hvd.elastic(checkpoint={url!r}, checkpoint_every="1step")
def train(state):
    print("trains")

train(state)
"""


def _said(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(source)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("kind", _ALL, ids=lambda kind: str(kind.__name__))
def test_every_error_that_says_what_to_do_is_one_sentence(tmp_path: Path, kind: type[errors.EdlHvdError]) -> None:
    ended = _said(tmp_path, _RAISING.format(folder=str(Path(errors.__file__).parent.parent), kind=kind.__name__))
    sentence = f"{kind.__name__}: cannot do that; expected this, so do the other"
    assert ended.returncode == 1
    if issubclass(kind, errors.InternalError):
        assert "Traceback" in ended.stderr, "it is to be reported"
        assert "what another library said" in ended.stderr
    elif issubclass(kind, errors.UsageError):
        place, line, words = ended.stderr.splitlines()
        assert place == f'File "{tmp_path}/train.py", line 13, in train'
        assert line == f'    raise errors.{kind.__name__}("cannot do that; expected this, so do the other") from cause'
        assert words == sentence
    else:
        assert ended.stderr == f"{sentence}\n"


def test_an_error_of_the_script_keeps_its_traceback(tmp_path: Path) -> None:
    ended = _said(
        tmp_path,
        "from edl_hvd.worker.uncaught import shorten_tracebacks\nshorten_tracebacks()\n"
        "def train():\n    raise KeyError('label')\ntrain()\n",
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert ended.stderr.endswith("KeyError: 'label'\n")


def test_a_folder_that_cannot_be_written_is_one_sentence_of_a_real_script(tmp_path: Path) -> None:
    ended = _said(tmp_path, _REAL.format(url="/proc/nope"))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if "/proc/nope" in line]
    assert "StorageError: cannot " in line
    assert "choose another one" in line
