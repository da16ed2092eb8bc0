"""What the contract suites share: one server of each cloud for all of them.

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
from cloud_servers import AzureStorageServer, GoogleStorageServer, azure_server
from servers import AwsServer


@pytest.fixture(scope="session")
def aws() -> Iterator[AwsServer]:
    """A running server; tests that need it empty take a bucket or a tag of their own."""
    with AwsServer() as server:
        yield server


@pytest.fixture(scope="session")
def google_storage() -> Iterator[GoogleStorageServer]:
    """A running server of Google's storage; tests take a bucket of their own."""
    server = GoogleStorageServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_storage() -> Iterator[AzureStorageServer]:
    """A running server of Azure's storage; tests take a container of their own. Skips where Azurite is missing."""
    server = azure_server()
    yield server
    server.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-seeds", type=int, default=8, help="crash points on each kind of storage (default 8)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        metafunc.parametrize("crash_seed", range(metafunc.config.getoption("--crash-seeds", default=8)))
