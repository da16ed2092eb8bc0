"""What the contract suites share: one AWS server for all of them.

``--crash-seeds N`` sets how many seeded crash points are tried on each kind of storage.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# The fixtures of the suites of ``edl-hvd checkpoint``.
from checkpoint_jobs import job as job
from checkpoint_jobs import local as local
from checkpoint_jobs import say as say
from checkpoint_jobs import use_aws as use_aws
from servers import AwsServer


@pytest.fixture(scope="session")
def aws() -> Iterator[AwsServer]:
    """A running server; tests that need it empty take a bucket or a tag of their own."""
    with AwsServer() as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-seeds", type=int, default=8, help="crash points on each kind of storage (default 8)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        metafunc.parametrize("crash_seed", range(metafunc.config.getoption("--crash-seeds", default=8)))
