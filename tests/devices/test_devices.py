"""A checkpoint knows no devices: whatever the state was on, it comes back where the script that goes on has it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import far_device
import pytest

FOLDER = Path(__file__).parent
DEVICES = ["cpu", "far", "both"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_device.build(tmp_path_factory.mktemp("far"))


def printed_by(script: str, *arguments: object, **settings: object) -> dict[str, object]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    environment = {"PATH": "", **{name: str(value) for name, value in settings.items()}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def train(library: Path, device: str, epochs: int, checkpoint: Path) -> dict[str, object]:
    settings = {"EDL_HVD_CHECKPOINT": checkpoint, "EDL_HVD_CHECKPOINT_EVERY": "3steps"}
    return printed_by("training_script.py", library, device, epochs, **settings)


@pytest.fixture(scope="module")
def uninterrupted(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return train(library, "cpu", 3, tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("before", DEVICES)
def test_a_run_goes_on_on_any_devices_and_learns_the_same_bit_for_bit(library, uninterrupted, tmp_path, before):
    assert train(library, before, 2, tmp_path / before)["began"] == [0]
    for after in DEVICES:
        shutil.copytree(tmp_path / before, tmp_path / after / "copy")
        found = train(library, after, 3, tmp_path / after / "copy")
        assert found["began"] == [8]
        assert found["devices"] == (["cpu"] if after == "cpu" else ["cpu", "far"])
        assert found["digest"] == uninterrupted["digest"], f"from {before} to {after}"


def test_a_worker_takes_over_the_state_of_one_on_other_devices_follows_it_and_comes_back_to_commits(library):
    assert printed_by("handing_script.py", library) == {"wrong": [], "right": 4 * len(DEVICES) ** 2}


def test_the_host_cannot_read_the_far_device(library):
    """Else the test above would show nothing."""
    reads = (
        "import ctypes, sys, torch, far_device\n"
        "far_device.use(sys.argv[1])\n"
        "tensor = torch.ones(5).to('far')\n"
        "assert tensor.device.type == 'far' and tensor.cpu().sum() == 5 and far_device.allocated_bytes() == 20\n"
        "ctypes.string_at(tensor.data_ptr(), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", reads, library], env={"PYTHONPATH": str(FOLDER)}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
