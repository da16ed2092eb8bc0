"""Running jobs from tests, and the same tests on stock Horovod.

``--stock`` runs every test's stock variant as well: it shows the failure the test guards against, so it must fail.
Without the option only the quick ones run. ``--chaos-seeds N`` sets how many seeded random kills are tried,
``--storms N`` how many seeded storms of faults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The workers import these modules as scripts do, from their own folder; the tests do the same.
sys.path.insert(0, str(Path(__file__).parent))

import harness
from faults import AnyFault
from harness import Job, Outcome
from invariants import check
from reference import Reference
from training import Training

# Above what a test takes: nobody may need it to notice anything.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stock", action="store_true", help="also show the failures on stock Horovod (slow)")
    parser.addoption("--storms", type=int, default=3, help="number of seeded storms of faults (default 3)")
    parser.addoption("--chaos-seeds", type=int, default=6, help="number of seeded random kills (default 6)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stock: shows a failure of stock Horovod; runs with --stock only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--stock", default=False):
        return
    for item in items:
        if item.get_closest_marker("stock"):
            item.add_marker(pytest.mark.skip(reason="shows a failure of stock Horovod; run with --stock"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "storm_seed" in metafunc.fixturenames:
        metafunc.parametrize("storm_seed", range(metafunc.config.getoption("--storms", default=3)))
    if "chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("chaos_seed", range(metafunc.config.getoption("--chaos-seeds", default=6)))


@pytest.fixture
def run_job(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a job in a folder of the test's own."""
    return lambda job, name="job": harness.run(job, tmp_path / name)


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
