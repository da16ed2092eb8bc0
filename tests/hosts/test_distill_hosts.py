"""The guide of ``docs/distillation.md`` for three hosts, walked as it stands there; then hosts go and come back.

node-1 has the students, node-2 and node-3 have teachers, and node-4 gets students later. Each has a network of its own,
and files of its own at the place of the checkout, so what the guide does not copy is not there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import namespaces
import pytest
from waiting import LONG_S, soon

from edl_hvd.events import read_events

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())

NODES = {"node-1": "driver", "node-2": "h2", "node-3": "h3", "node-4": "h1"}
PROGRAMS = str(Path(sys.executable).parent)
SECTION = (harness.REPOSITORY / "docs" / "distillation.md").read_text().partition("### Three hosts\n")[2]
SECTION = SECTION.partition("\n##")[0]


def commands() -> list[str]:
    """The guide's commands, in order."""
    blocks = "\n".join(re.findall(r"^```console\n(.*?)^```", SECTION, flags=re.MULTILINE | re.DOTALL))
    return [line[2:] for line in blocks.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


class Guide:
    """The hosts of the guide, with a checkout each; what a test does on them."""

    def __init__(self, network: namespaces.Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        for node, name in NODES.items():
            own = self.files(node)
            own.mkdir()
            (own / "examples").symlink_to(harness.REPOSITORY / "examples")
            network.hosts[name].run("mount", "--bind", str(own), str(self.checkout))
            with open(network.folder / f"hosts.{name}", "a", encoding="utf-8") as hosts:
                hosts.writelines(f"{namespaces.ADDRESSES[there]} {known}\n" for known, there in NODES.items())
        path = os.pathsep.join([str(network.tools), PROGRAMS, os.environ["PATH"]])
        self.variables = {"PATH": path, "PYTHONPATH": str(harness.REPOSITORY), "OMP_NUM_THREADS": "1"}
        [self.make_token, self.make_teacher, self.teach, self.list, self.look, self.train] = commands()

    def files(self, node: str) -> Path:
        """The files that a node has at the place of the checkout."""
        return self.folder / node

    def copy(self, node: str, *names: str) -> None:
        """Copy files of node-1 to a node."""
        for name in names:
            there, here = self.files(node) / name, self.files("node-1") / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(here, there, dirs_exist_ok=True) if here.is_dir() else shutil.copy(here, there)

    def start(self, command: str, output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command of a shell on node-1."""
        words = self.network.driver.words("sh", "-c", f"exec {command}", folder=self.checkout)
        if "=" in command.split()[0]:
            words = self.network.driver.words("sh", "-c", f"exec env {command}", folder=self.checkout)
        with open(output, "wb") as file:
            return subprocess.Popen(
                words, env={**os.environ, **self.variables, **variables}, stdout=file, stderr=subprocess.STDOUT
            )

    def run(self, command: str, **variables: str) -> str:
        """Run a command of a shell on node-1; its output."""
        words = self.network.driver.words("sh", "-c", command, folder=self.checkout)
        done = subprocess.run(
            words, env={**os.environ, **self.variables, **variables}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_teacher(self, node: str) -> Teacher:
        return Teacher(self, node)


class Teacher:
    """The guide's teacher on a node, which somebody has started who is logged in there."""

    def __init__(self, guide: Guide, node: str) -> None:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in guide.variables.items())
        command = f"cd {guide.checkout} && echo $$ && exec env {variables} {guide.teach}"
        self._ssh = [str(guide.network.tools / "ssh"), NODES[node]]
        words = guide.network.driver.words(*self._ssh, command)
        self._guide = guide
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._pid = int(self.process.stdout.readline())
        self.said = self.process.stdout.readline()

    def terminate(self) -> int:
        """End it with SIGTERM; its exit code."""
        self._guide.network.driver.run(*self._ssh, f"kill -TERM {self._pid}")
        code = soon(self.process)
        self.process.communicate()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.terminate()


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> Iterator[Guide]:
    """The hosts after the guide's steps on node-1 that make the token and the teacher."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "network").mkdir()
    with namespaces.connect(folder / "network") as network:
        guide = Guide(network, folder)
        guide.run(guide.make_token)
        guide.run(guide.make_teacher)
        for node in ("node-2", "node-3"):
            guide.copy(node, "token.txt", "runs/distill")
        yield guide


@pytest.fixture
def teachers(guide) -> Iterator[dict[str, Teacher]]:
    """A teacher on node-2 and one on node-3; listed."""
    found = {node: guide.start_teacher(node) for node in ("node-2", "node-3")}
    guide.run(guide.list)
    yield found
    for teacher in found.values():
        teacher.close()


class Watch:
    """The event log of a job, while it runs."""

    def __init__(self, path: Path, job: subprocess.Popen[bytes], output: Path) -> None:
        self.path, self.job, self.output = path, job, output

    def lines(self) -> list[dict[str, Any]]:
        return read_events(self.path) if self.path.exists() else []

    def wait(self, is_so: Callable[[list[dict[str, Any]]], bool], since: int = 0) -> int:
        """Wait until something is so of the events from a number on; the number of events then."""
        count, deadline_s = -1, 0.0
        while True:
            lines = self.lines()
            if is_so(lines[since:]):
                return len(lines)
            if len(lines) > count:  # a bound for a job that stands still, not for one that is slow
                count, deadline_s = len(lines), time.monotonic() + LONG_S
            assert self.job.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < deadline_s, self.output.read_text()[-4000:]
            time.sleep(0.05)


def of(event: str, teacher: str, times: int = 1) -> Callable[[list[dict[str, Any]]], bool]:
    """Whether as many workers have told this of a teacher."""
    return lambda lines: sum(one["event"] == event and one.get("teacher") == teacher for one in lines) >= times


def committed(steps: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda lines: sum(one["event"] == "commit" for one in lines) >= steps


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)]


def test_the_guide_for_three_hosts_and_a_host_of_teachers_that_goes_and_comes_back(guide, teachers, tmp_path):
    assert {teacher.said for teacher in teachers.values()} == {"TextTeacher answers at 0.0.0.0:7010\n"}
    assert "2 of 2 teachers" in guide.run(guide.look)
    events, output = tmp_path / "events.jsonl", tmp_path / "output.txt"
    job = guide.start(f"{guide.train} --epochs 100000", output, EDL_HVD_EVENTS=str(events))
    watch = Watch(events, job, output)
    try:
        for node in ("node-2:7010", "node-3:7010"):
            watch.wait(of("teacher_joined", node, times=2))
        # The host goes without a word, and comes back as if nothing had been.
        guide.network.cut("h3")
        gone = watch.wait(of("teacher_lost", "node-3:7010", times=2))
        watch.wait(committed(20), since=gone)
        guide.network.mend("h3")
        back = watch.wait(of("teacher_joined", "node-3:7010", times=2), since=gone)
        # "One that is removed is used until its teacher ends."
        (guide.files("node-1") / "teachers.txt").write_text("node-2:1\n")
        watch.wait(committed(20), since=back)
        assert not of("teacher_lost", "node-3:7010")(watch.lines()[back:])
        assert teachers["node-3"].terminate() == 0
        left = watch.wait(of("teacher_lost", "node-3:7010", times=2), since=back)
        assert {one["reason"] for one in watch.lines()[back:] if one["event"] == "teacher_lost"} == {"it left"}
        # "A host that is added is used."
        teachers["node-3"] = guide.start_teacher("node-3")
        guide.run(guide.list)
        added = watch.wait(of("teacher_joined", "node-3:7010", times=2), since=left)
        watch.wait(lambda lines: any(one["event"] == "answers" for one in lines), since=added)
        job.send_signal(signal.SIGINT)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
        soon(job)
    found = losses(output.read_text())
    plain = losses(guide.run(f"python examples/distill/text_plain.py --epochs {min(4, len(found))}"))
    assert found[: len(plain)] == pytest.approx(plain, rel=1e-3)
    assert not [one for one in watch.lines() if one["event"] in ("worker_lost", "teacher_refused")]


def test_students_on_several_hosts_have_the_files_that_the_guide_names(guide, teachers, tmp_path):
    """Without the token the job ends with a line that says so; without the list its workers wait for one."""
    on_two = guide.train.replace("edlrun -np 2", "edlrun -np 2 -H node-1:1,node-4:1") + " --epochs 2"
    events, output = tmp_path / "events.jsonl", tmp_path / "output.txt"
    guide.copy("node-4", "runs/distill")
    assert soon(guide.start(on_two, output)) == 1
    assert "cannot read the teachers' token from 'token.txt'" in output.read_text()
    guide.copy("node-4", "token.txt")
    job = guide.start(on_two, output, EDL_HVD_EVENTS=str(events))
    watch = Watch(events, job, output)
    try:
        watch.wait(lambda lines: any(one["event"] == "teachers_short" for one in lines))
        guide.copy("node-4", "teachers.txt")
        assert soon(job) == 0, output.read_text()
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            soon(job)
    text = output.read_text()
    print(text, events.read_text())
    plain = losses(guide.run("python examples/distill/text_plain.py --epochs 2"))
    assert losses(text) == pytest.approx(plain, rel=1e-3)
    assert text.count("workers 2") == 2
    assert {one["worker"] for one in watch.lines() if one["event"] == "answers"} == {"node-1:0", "node-4:0"}
