"""Exit code 2 of ``edlrun`` where nothing was started, as docs/settings.md has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from harness import REPOSITORY

EDLRUN = [sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", "1"]


def ended(*words: str, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [*EDLRUN, *words, "sh", "-c", "echo started"], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_job_folder_that_cannot_be_used(tmp_path: Path) -> None:
    code, out, err = ended("--job-dir", "/proc/x", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "the job's folder /proc/x cannot be used" in err


def test_a_port_for_agents_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length")
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("0.0.0.0", 0)) as used:
        port = str(used.getsockname()[1])
        words = ("--agents-port", port, "--token-file", "token", "--job-dir", "job")
        code, out, err = ended(*words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert f"--agents-port {port} cannot be listened on" in err
    assert '"code": 2' in (tmp_path / "job" / "status.json").read_text()
