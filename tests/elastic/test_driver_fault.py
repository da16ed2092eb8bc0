"""An ``edlrun`` that cannot take in what a worker says ends with one sentence, and leaves no worker behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG_S

HERE = Path(__file__).parent
# As where no port is free, or the driver has a fault: the store of a world is made when the last worker is ready.
PROGRAM = """
import sys
from edl_hvd import errors
from edl_hvd.cli.edlrun import main
from edl_hvd.driver import job

def refuse(*arguments, **more):
    raise {error}

job.KeyValueStore = refuse
sys.argv = ["edlrun", "-np", "1", sys.executable, {script!r}]
main()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("errors.PlatformError('no port is free')", "edlrun: no port is free"),
        ("OSError(24, 'Too many open files')",
         "edlrun: the driver failed at the event Ready: OSError: [Errno 24] Too many open files; this is a fault of"),
    ],
    ids=["of a host", "of the driver"],
)  # fmt: skip
def test_a_driver_that_fails_while_it_hears_a_worker_says_why_and_ends(tmp_path: Path, error: str, said: str) -> None:
    script = str(HERE / "time_slice_script.py")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error, script=script)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent), "SUPPORT": str(HERE.parent / "support")},
        cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(said), ended.stderr
    assert "client_connected_cb" not in ended.stderr
    assert ("Traceback" in ended.stderr) == ("OSError" in said), "one for a report, and none for what a user can mend"
