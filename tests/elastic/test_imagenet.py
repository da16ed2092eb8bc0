"""The ImageNet example: one file, run by plain Python and by ``horovodrun``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edl_hvd.events import read_events

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "imagenet"
# Six steps of 64 images, and a validation of all 296.
FLAGS = "--arch resnet18 --image-size 32 --epochs 1 --limit-batches 6 --global-batch 64 --micro-batch 16 --workers 0"
TWO_HOSTS = "--gloo -np 2 -H localhost:1,127.0.0.1:1 --network-interfaces lo"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    subprocess.run([sys.executable, str(EXAMPLE / "digits.py"), str(folder)], check=True)
    return folder


def train(digits: Path, events: Path, launcher: list[str]) -> list[dict[str, Any]]:
    """The event log of a run that ended well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "EDL_HVD_"))}
    script = [sys.executable, str(EXAMPLE / "train.py"), "--data", str(digits), "--events", str(events), *FLAGS.split()]
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*launcher, *script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_events(events)


def test_the_same_file_runs_alone_and_on_two_hosts(digits, tmp_path):
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), *TWO_HOSTS.split()]
    alone = train(digits, tmp_path / "alone.jsonl", [])
    on_two = train(digits, tmp_path / "two.jsonl", horovodrun)

    for events, expected in ((alone, ["localhost:0"]), (on_two, ["localhost:0", "127.0.0.1:0"])):
        assert [line["members"] for line in events if line["event"] == "world_formed"] == [expected]
        assert [line["samples"] for line in events if line["event"] == "job_ended"] == [6 * 64]
        validations = [line["values"] for line in events if line["event"] == "metrics" and "top1" in line["values"]]
        assert [values["validation_images"] for values in validations] == [296]
        assert 0 <= validations[0]["top1"] <= validations[0]["top5"] <= 1
    assert logged_losses(alone)[0] == pytest.approx(logged_losses(on_two)[0], rel=1e-6), "of the whole global batch"


def logged_losses(events: list[dict[str, Any]]) -> list[float]:
    return [line["values"]["loss"] for line in events if line["event"] == "metrics" and "loss" in line["values"]]
