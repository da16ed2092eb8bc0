"""The script of docs/from_horovod.md, started in every way a script may be started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
TWO_WORKERS = [HOROVODRUN, "-np", "2", "--network-interfaces", "lo"]
ELASTIC = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", "printf localhost:1\\\\n127.0.0.1:1\\\\n"]
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe", "--allow-run-as-root"]


@pytest.fixture
def script(tmp_path):
    text = (REPOSITORY / "docs" / "from_horovod.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(code)
    return path


def run(command: list[str], script: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_as_a_single_process(script):
    assert "finished on rank 0 of 1" in run([], script)


def test_as_a_single_process_where_horovod_is_not_installed(script, tmp_path):
    (tmp_path / "absent" / "horovod").mkdir(parents=True)
    (tmp_path / "absent" / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('no Horovod here')")
    path = f"{tmp_path / 'absent'}{os.pathsep}{REPOSITORY}"
    assert "finished on rank 0 of 1" in run([], script, PYTHONPATH=path)


@pytest.mark.parametrize("flags", [["-H", "localhost:1,127.0.0.1:1"], ELASTIC], ids=["fixed", "elastic"])
def test_under_horovodrun(script, flags):
    output = run([*TWO_WORKERS, *flags], script)
    assert "finished on rank 0 of 2" in output
    assert "finished on rank 1 of 2" in output


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI on this machine (apt-get install openmpi-bin)")
def test_under_mpirun(script):
    output = run(MPIRUN, script)
    assert "finished on rank 0 of 2" in output
    assert "finished on rank 1 of 2" in output


def test_the_launcher_starts_a_worker_without_horovod(script, tmp_path):
    (tmp_path / "absent" / "horovod").mkdir(parents=True)
    (tmp_path / "absent" / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError('no Horovod here')")
    variables = {
        "PYTHONPATH": f"{tmp_path / 'absent'}{os.pathsep}{REPOSITORY}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "started by horovodrun, but a package it needs cannot be imported here" in done.stderr
    assert "edl-hvd build-horovod" in done.stderr
