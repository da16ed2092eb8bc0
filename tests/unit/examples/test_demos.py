"""What the demos share: processes that end with the demo, and an exit code that says whether promises were kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))  # as if a demo had been started

from demos import Promise, Stage, StageError, digest_of, made_anew, show_promises
from waiting import soon

SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; print('here', flush=True); subprocess.run([sys.executable, '-c', '{SLEEP}'])"
DEMO = f"""
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started all of this with it ignored
from contextlib import closing
from pathlib import Path
from demos import CONSOLE, Stage, StageError, play

def main():
    with closing(Stage(Path(sys.argv[1]))) as stage:
        stage.start("job", [sys.executable, "-c", {SLEEP!r}])
        print(stage.processes["job"].pid, flush=True)
        if sys.argv[2] == "waits":
            stage.until("the end of the world", lambda: False, "job")
        raise StageError("[this] is why")

play(main)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with closing(Stage(tmp_path)) as stage:
        yield stage


def start_parent(stage: Stage) -> psutil.Process:
    """Start a process that has started another one, which is returned."""
    stage.start("parent", [sys.executable, "-c", PARENT])
    parent = psutil.Process(stage.processes["parent"].pid)
    stage.until("it has started another", lambda: bool(parent.children()), "parent")
    return parent.children()[0]


@pytest.mark.parametrize("end", [Stage.end, Stage.kill])
def test_what_a_process_has_started_ends_with_it(stage: Stage, end) -> None:
    child = start_parent(stage)
    end(stage, "parent")
    assert psutil.wait_procs([child], timeout=60)[1] == []
    assert stage.log("parent").read_text() == "here\n"


def test_waiting_ends_with_the_process_that_is_waited_for(stage: Stage) -> None:
    stage.start("job", [sys.executable, "-c", "import sys; sys.exit('no memory')"])
    with pytest.raises(StageError, match=r"job has ended with exit code 1 before this: [^\n]*\nno memory"):
        stage.until_exit("job")


def test_what_holds_at_its_end_counts(stage: Stage) -> None:
    stage.start("job", [sys.executable, "-c", "import os; print(os.environ['WORD'], os.getcwd())"], Path("/"), WORD="a")
    stage.until("it has printed", lambda: stage.log("job").read_text() == "a /\n", "job")
    stage.until_exit("job")


def test_patience_begins_anew_with_each_change(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr("demos.PATIENCE_S", 3.0)
    stage.start("job", [sys.executable, "-c", SLEEP])
    looks = 0

    def holds() -> bool:
        nonlocal looks
        looks += 1
        stage.notice("looks", min(looks, 15))
        stage.notice("nothing", 0)
        return False

    with pytest.raises(StageError, match="nothing else for 3 s: the end"):
        stage.until("the end", holds, "job")
    assert looks > 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_a_demo_has_started_ends_with_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with subprocess.Popen(demo(tmp_path, "waits"), stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        job = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert soon(process) == code
    assert not job.is_running()


def test_a_demo_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    done = subprocess.run(demo(tmp_path, "fails"), env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (1, ["FAILED [this] is why"])


def demo(folder: Path, way: str) -> list[str]:
    return [sys.executable, "-c", DEMO, str(folder), way]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(("is_kept", "code", "verdict"), [(True, 0, "Every promise"), (False, 1, "1 were broken")])
def test_one_broken_promise_makes_the_exit_code_1(capsys, is_kept: bool, code: int, verdict: str) -> None:
    assert show_promises([Promise("a", "b", True), Promise("c", "d", is_kept)], "Picture  p.png") == code
    shown = capsys.readouterr().out
    assert verdict in shown
    assert "Picture  p.png" in shown


def test_the_last_digest_counts() -> None:
    first, last = "0" * 64, "a" * 64
    assert digest_of(f"weights sha256 {first}\nweights sha256 {last}\n") == last
    assert digest_of("weights sha256 0\n") == ""


def test_a_folder_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old").touch()
    assert list(made_anew(tmp_path / "runs").iterdir()) == []
    assert list(made_anew(tmp_path / "a" / "b").iterdir()) == []
