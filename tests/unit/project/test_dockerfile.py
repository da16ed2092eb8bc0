"""The image, as its Dockerfile describes it: what is in which stage, and who runs there. No image is built."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).parents[3] / "Dockerfile"
# What only a build needs: compilers, headers, version control.
TOOLS_OF_BUILDS = re.compile(
    r"\b(?:g\+\+|gcc|clang|cmake|make|build-essential|git|nvcc|lib[a-z0-9-]+-dev|python3-dev|python3-venv)(?![\w+-])"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its name, and the rest with joined lines."""

    name: str
    words: str


@dataclass(frozen=True)
class Stage:
    """What is between two FROM.

    Attributes:
        base: Image that it begins with.
        name: Name by which other stages copy from it, or "".
        body: Its instructions.
    """

    base: str
    name: str
    body: tuple[Instruction, ...]

    def words_of(self, name: str) -> list[str]:
        return [instruction.words for instruction in self.body if instruction.name == name]


def read_dockerfile(text: str) -> list[Stage]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    instructions = [
        Instruction(name.upper(), words.strip()) for name, words in re.findall(r"^(\w+) (.+)$", joined, re.M)
    ]
    starts = [place for place, instruction in enumerate(instructions) if instruction.name == "FROM"]
    stages = []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        base, _, name = instructions[start].words.partition(" AS ")
        stages.append(Stage(base, name.strip(), tuple(instructions[start + 1 : end])))
    return stages


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return read_dockerfile(DOCKERFILE.read_text())


def default_of(argument: str) -> str:
    found = re.search(rf"^ARG {argument}=(\S+)$", DOCKERFILE.read_text(), re.M)
    assert found is not None, argument
    return found[1]


def test_wheels_are_built_in_one_stage_and_installed_in_the_next(stages: list[Stage]) -> None:
    build, worker = stages
    assert (build.base, worker.base) == ("${BASE}", "${RUNTIME}")
    assert "-devel-" in default_of("BASE")
    assert "-devel-" not in default_of("RUNTIME")
    assert [words.split() for words in worker.words_of("COPY")] == [
        [f"--from={build.name}", "/opt/edl_hvd", "/opt/edl_hvd"]
    ]
    [commands] = build.words_of("RUN")[1:]
    assert "edl-hvd build-horovod ${BUILD_ARGS} --wheel /wheels" in commands
    assert re.search(r"/opt/edl_hvd/bin/pip install .*/wheels/edl_hvd-\*\.whl.*/wheels/horovod-\*\.whl", commands)


def test_what_only_a_build_needs_is_not_in_the_image_of_a_worker(stages: list[Stage]) -> None:
    build, worker = stages
    assert len(set(TOOLS_OF_BUILDS.findall(" ".join(build.words_of("RUN"))))) >= 5
    assert TOOLS_OF_BUILDS.findall(" ".join(worker.words_of("RUN"))) == []
    assert [words for words in worker.words_of("RUN") if "pip " in words or "build-horovod" in words] == []


def test_a_worker_is_not_root(stages: list[Stage]) -> None:
    worker = stages[-1]
    users = worker.words_of("USER")
    assert users == ["worker"], "nothing of it goes back to root"
    before = worker.body[: [instruction.name for instruction in worker.body].index("USER")]
    after = worker.body[len(before) + 1 :]
    assert any(f"useradd --create-home --shell /bin/bash {users[0]}" in instruction.words for instruction in before)
    for instruction in after:
        assert not re.search(r"\b(?:apt-get|useradd|sudo)\b|/etc/", instruction.words), "only root may do this"
    [port] = worker.words_of("EXPOSE")
    assert int(port) >= 1024, "only root may open a lower one"


def test_it_says_what_it_is(stages: list[Stage]) -> None:
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(stages[-1].words_of("LABEL"))))
    names = [f"org.opencontainers.image.{name}" for name in ("title", "description", "licenses", "version")]
    assert sorted(labels) == sorted(names)
    assert all(labels.values())


def test_no_container_has_the_host_key_of_another(stages: list[Stage]) -> None:
    """It is made when a container starts."""
    worker = stages[-1]
    assert not any("ssh-keygen" in words for words in worker.words_of("RUN"))
    [command] = worker.words_of("CMD")
    shell, flag, script = json.loads(command)
    assert (shell, flag) == ("sh", "-c")
    assert script.index("ssh-keygen") < script.index("sshd -D")
