"""Workers whose ``edlrun`` is gone end by themselves, whatever they are at: nobody else is left to end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import LONG_S, soon

HERE = Path(__file__).parent
EDLRUN = str(Path(sys.executable).with_name("edlrun"))


def _read_when_there(path: Path) -> int:
    for _ in range(int(LONG_S / 0.05)):
        if path.exists():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was not written")


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or only not yet collected."""
    try:
        process.wait(timeout=LONG_S)
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("how", ["trains", "sleeps", "computes", "is frozen"])
def test_a_worker_whose_edlrun_was_killed_ends_by_itself(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "EDL_HVD_TERMINATION_GRACE": "2"}
    words = [EDLRUN, "-np", "2", "-H", "localhost:2", sys.executable, str(HERE / "orphaned_script.py")]
    with open(tmp_path / "output", "w") as output:
        driver = subprocess.Popen(
            [*words, str(tmp_path), how], env=environment, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT
        )
    workers = []
    try:
        workers = [psutil.Process(_read_when_there(tmp_path / f"worker-{rank}")) for rank in range(2)]
        if how == "is frozen":
            workers[1].suspend()
        driver.kill()
        soon(driver)
        assert _has_ended(workers[0]), "it does not wait for the other one"
        if how == "is frozen":
            assert workers[1].status() == psutil.STATUS_STOPPED
            workers[1].resume()
        assert _has_ended(workers[1])
    finally:
        for process in workers:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        if driver.poll() is None:
            driver.kill()
            soon(driver)
