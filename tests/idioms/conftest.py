"""The idioms, for the tests of this folder.

``--fault-seeds N`` sets how many seeded faults, anywhere in its job, each idiom is tried with.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seeds", type=int, default=1, help="seeded faults of each idiom (default 1)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--fault-seeds", default=1)))
