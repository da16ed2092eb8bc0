"""The lists of stages that CI runs beside each other: one that fails ends all, and what they print stays whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import soon

REPOSITORY = Path(__file__).parents[3]
HEAD = f"set -euo pipefail\n. '{REPOSITORY}/.ci/stages.sh'\n"
# It says who it is, and waits for what does not come; SIGINT ends it as it does a test.
WAITS = """\
import os, signal
try:
    print(os.getpid(), file=open("waits.part", "w"), flush=True)
    os.rename("waits.part", "waits")
    signal.pause()
except KeyboardInterrupt:
    open("told", "w")
"""
UNTIL_WAITS = "until [ -e waits ]; do sleep 0.01; done"


def script(folder: Path, first: str, second: str) -> subprocess.Popen[str]:
    """A script of two lists; their stages are lines."""
    (folder / "waits.py").write_text(WAITS)
    text = f"{HEAD}one() {{\n{first}\n}}\ntwo() {{\n{second}\n}}\ntogether one two\nstage last echo the end\n"
    return subprocess.Popen(["bash", "-c", text], cwd=folder, stdout=subprocess.PIPE, text=True)


def stage(name: str, commands: str) -> str:
    return f"stage '{name}' bash -c '{commands}'"


def test_lists_run_beside_each_other_and_what_a_stage_prints_stays_together(tmp_path: Path) -> None:
    subprocess.run(["mkfifo", "a", "b"], cwd=tmp_path, check=True)
    first = stage("asks", "echo asks; echo >a; read -r line <b; echo is answered")
    second = stage("answers", "read -r line <a; echo answers; echo >b; echo has answered")
    with script(tmp_path, first, second) as process:
        output = process.communicate()[0]
    assert process.returncode == 0
    found = (part.partition("\n") for part in output.split("\n=== "))
    parts = {name: lines.splitlines()[:2] for name, _, lines in found}
    assert parts["asks"] == ["asks", "is answered"]
    assert parts["answers"] == ["answers", "has answered"]
    assert parts["last"][0] == "the end"


@pytest.mark.parametrize("failing", ["one", "two"])
def test_a_stage_that_fails_ends_the_script_and_what_runs_beside_it(tmp_path: Path, failing: str) -> None:
    waits = stage("waits", f"{sys.executable} waits.py")
    fails = "\n".join([stage("good", UNTIL_WAITS), stage("bad", "echo its words; exit 7"), stage("next", "echo never")])
    with script(tmp_path, *((fails, waits) if failing == "one" else (waits, fails))) as process:
        output = process.communicate()[0]
    assert process.returncode == 7
    assert not psutil.pid_exists(int((tmp_path / "waits").read_text()))
    assert (tmp_path / "told").exists()
    assert "never" not in output
    assert "the end" not in output
    end = output[output.index("\n=== bad\n") :].splitlines()
    assert end[2] == "its words"
    assert end[-1] == "=== bad: failed with exit code 7"


def test_what_ends_the_script_ends_its_stages(tmp_path: Path) -> None:
    waits = stage("waits", f"{sys.executable} waits.py")
    with script(tmp_path, waits, stage("good", UNTIL_WAITS)) as process:
        assert process.stdout is not None
        while "good: done" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert soon(process) == 128 + signal.SIGTERM or process.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(int((tmp_path / "waits").read_text()))
    assert (tmp_path / "told").exists()
