"""The smallest example, with the commands of the README: in one process, and while hosts come and go."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ALONE = "python examples/minimal.py"
ELASTIC = "edlrun -np 2 --min-np 1 --discover file:hosts.txt python examples/minimal.py"
BOTH_HOSTS = r"printf 'localhost\n127.0.0.1\n' > hosts.txt"
ONE_HOST = "echo 127.0.0.1 > hosts.txt"
LINE = re.compile(r"epoch (\d+): loss (\d+\.\d+), workers (\d+)$")


@dataclass(frozen=True)
class Epoch:
    """What the script prints of one."""

    number: int
    loss: float
    workers: int


class Job:
    """A command that runs in ``folder``; each epoch as it is printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.output = ""

    def epochs(self) -> Iterator[Epoch]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            match = LINE.search(line.rstrip())
            if match:
                yield Epoch(int(match[1]), float(match[2]), int(match[3]))

    def exit_code(self) -> int:
        return self._process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


@contextmanager
def started(command: str, folder: Path) -> Iterator[Job]:
    words = shlex.split(command)
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]], cwd=folder, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield Job(process)
    finally:
        process.terminate()  # edlrun then ends its workers; nothing is there to end after a test that passed
        process.communicate()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}


def shell(command: str, folder: Path) -> None:
    subprocess.run(command, shell=True, check=True, cwd=folder)


def test_hosts_come_and_go_and_the_loss_is_that_of_one_process(folder):
    shell(BOTH_HOSTS, folder)
    changes = {2: ONE_HOST, 1: BOTH_HOSTS}  # done once that many workers have been seen
    with started(ALONE, folder) as alone, started(ELASTIC, folder) as elastic:
        seen = []
        for epoch in elastic.epochs():
            seen.append(epoch)
            if epoch.workers in changes and (epoch.workers == 2 or 2 not in changes):
                shell(changes.pop(epoch.workers), folder)
        reference = list(alone.epochs())
        assert elastic.exit_code() == 0, elastic.output
        assert alone.exit_code() == 0, alone.output

    assert changes == {}, f"no world of {list(changes)} workers:\n{elastic.output}"
    assert [epoch.workers for epoch in reference] == [1] * len(reference)
    assert [epoch.number for epoch in seen] == [epoch.number for epoch in reference]
    assert [epoch.loss for epoch in seen] == pytest.approx([epoch.loss for epoch in reference], rel=1e-4)
    assert reference[-1].loss < 0.1 * reference[0].loss
