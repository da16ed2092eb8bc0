"""What init() takes out of the garbage collector's sight, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc, pathlib, sys
import torch
import edl_hvd

edl_hvd.init()
before = gc.get_freeze_count()
print(before > 100_000, len(gc.get_objects()) < before / 10)


class Log:
    def __init__(self, path):
        self.path = path
        self.callbacks = [self.close]  # a cycle

    def close(self):
        pathlib.Path(self.path).write_text("closed")

    def __del__(self):
        self.close()


log = Log(sys.argv[1])
del log
if sys.argv[2] == "collected":
    gc.collect()
    print(pathlib.Path(sys.argv[1]).read_text())
edl_hvd.shutdown()
edl_hvd.init()
print(before / 2 < gc.get_freeze_count() <= before)
"""


def output(path: Path, word: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(path), word]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_is_imported_is_left_alone_and_what_the_script_makes_is_collected(tmp_path: Path) -> None:
    assert output(tmp_path / "log", "collected") == ["True True", "closed", "True"]


def test_what_only_a_cycle_holds_is_finalized_at_the_end_of_the_process(tmp_path: Path) -> None:
    assert output(tmp_path / "log", "at the end") == ["True True", "True"]
    assert (tmp_path / "log").read_text() == "closed"
