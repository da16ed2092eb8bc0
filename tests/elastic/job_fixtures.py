"""What every test that runs a job asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from faults import AnyFault
from harness import Job, Outcome
from invariants import check
from reference import Reference
from training import Training

from edl_hvd.key_value_store import KeyValueStore

# Above what a test takes: nobody may need it to notice anything.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


@pytest.fixture
def preloaded() -> bool:
    """Whether the workers of ``edlrun`` are forked from a process that has imported torch."""
    return True


@pytest.fixture
def run_job(tmp_path: Path, preloaded: bool) -> Callable[..., Outcome]:
    """Runs a job in a folder of the test's own."""
    return lambda job, name="job": harness.run(job, tmp_path / name, preloaded)


@pytest.fixture
def run_either(run_job: Callable[..., Outcome], request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """Runs a job whose test is about the worker's side, which is the same under each launcher: see ``--launcher``.

    Under each a host is set aside at its first death, as ``horovodrun`` does: else it depends on the machine's speed
    whether who died is back before the end.
    """
    launcher = request.config.getoption("--launcher", default="edlrun")
    once = ("--host-failures", "1") if launcher == "edlrun" else ()

    def run(job: Job, name: str = "job") -> Outcome:
        if job.engine == "edl_hvd":
            job = replace(job, launcher=launcher, flags=(*job.flags, *once))
        return run_job(job, name)

    return run


@pytest.fixture
def edlrun(run_job: Callable[..., Outcome], alone: Callable[[Training], Reference]) -> Callable[..., Outcome]:
    """Runs a job under ``edlrun`` and checks it against the same training alone."""

    def run(hosts: tuple[str, ...], *faults: AnyFault, training: Training | None = None, **fields: Any) -> Outcome:
        training = training or Training()
        flags = (*LONG_GLOO_TIMEOUT, *fields.pop("flags", ()))
        job = Job(hosts=hosts, faults=faults, training=training, flags=flags, launcher="edlrun", **fields)
        outcome = run_job(job)
        check(job, outcome, alone(training))
        return outcome

    return run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Training], Reference]:
    """The same training in one process."""

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return lambda training: Reference(training, folder / "alone")


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    """Where ranks that a test starts itself meet."""
    store = KeyValueStore("127.0.0.1")
    yield store
    store.close()
