"""Running jobs from tests, and the same tests on stock Horovod.

``--stock`` runs every test's stock variant as well: it shows the failure the test guards against, so it must fail.
Without the option only the quick ones run. ``--chaos-seeds N`` sets how many seeded random kills are tried,
``--storms N`` how many seeded storms of faults.

Tests of the worker's side run under ``edlrun``, or with ``--launcher horovodrun`` under that; those of a launcher
under their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The workers import these modules as scripts do, from their own folder; the tests do the same.
sys.path.insert(0, str(Path(__file__).parent))

from job_fixtures import alone, edlrun, run_either, run_job, store  # noqa: F401  # fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stock", action="store_true", help="also show the failures on stock Horovod (slow)")
    parser.addoption("--launcher", choices=["edlrun", "horovodrun"], default="edlrun", help="of what runs under both")
    parser.addoption("--storms", type=int, default=1, help="number of seeded storms of faults (default 1)")
    parser.addoption("--chaos-seeds", type=int, default=2, help="number of seeded random kills (default 2)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "either: runs under the launcher that --launcher names")
    config.addinivalue_line("markers", "stock: shows a failure of stock Horovod; runs with --stock only")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "run_either" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.either)
    if config.getoption("--stock", default=False):
        return
    for item in items:
        if item.get_closest_marker("stock"):
            item.add_marker(pytest.mark.skip(reason="shows a failure of stock Horovod; run with --stock"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "storm_seed" in metafunc.fixturenames:
        metafunc.parametrize("storm_seed", range(metafunc.config.getoption("--storms", default=1)))
    if "chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("chaos_seed", range(metafunc.config.getoption("--chaos-seeds", default=2)))
