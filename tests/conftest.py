"""What every test may rely on: the settings are the defaults, and nothing outside its own folder is touched.

``--stock`` runs every test's stock variant as well: it shows the failure the test guards against, so it must fail.
Without the option only the quick ones run. ``--launcher horovodrun`` runs under stock ``horovodrun`` what else runs
under ``edlrun`` though it is about the workers' side; tests of a launcher run under their own. ``--chaos-seeds N`` sets
how many seeded random kills are tried, ``--storms N`` how many seeded storms of faults.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# How fast the machine is decides no test.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Two cores run several workers at a time; a pool of threads in each makes all of them slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in list(os.environ):
        if name.startswith(("EDL_HVD_", "HOROVOD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDL_HVD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    runtime = tmp_path_factory.getbasetemp() / "runtime"
    runtime.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stock", action="store_true", help="also show the failures on stock Horovod (slow)")
    parser.addoption("--launcher", choices=["edlrun", "horovodrun"], default="edlrun", help="of what runs under both")
    parser.addoption("--storms", type=int, default=2, help="number of seeded storms of faults (default 2)")
    parser.addoption("--operator-kills", type=int, default=20, help="how often the operator is killed (default 20)")
    parser.addoption("--operator-swaps", type=int, default=6, help="how often another operator acts (default 6)")
    parser.addoption("--chaos-seeds", type=int, default=4, help="number of seeded random kills (default 4)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distill: students and teachers in processes; make test-distill runs it")
    config.addinivalue_line("markers", "learning: a long job about what is learned; make test-learning runs it")
    config.addinivalue_line("markers", "either: runs under the launcher that --launcher names")
    config.addinivalue_line("markers", "waits: for a minute or two, computing nothing; begins before all others")
    config.addinivalue_line("markers", "stock: shows a failure of stock Horovod; runs with --stock only")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: it is not searched for garbage, neither now nor while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "run_either" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.either)
        if item.get_closest_marker("stock") and not config.getoption("--stock"):
            item.add_marker(pytest.mark.skip(reason="shows a failure of stock Horovod; run with --stock"))
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, option in (("storm_seed", "--storms"), ("chaos_seed", "--chaos-seeds")):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(metafunc.config.getoption(option)))
