"""How far a step, a commit and a join walk through the package does not grow unnoticed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fake_world import alone

PATH = Path(__file__).parents[3] / "benchmarks" / "walk.py"


@pytest.fixture(scope="module")
def walk():
    """The benchmark, which finds its data classes by its name."""
    spec = importlib.util.spec_from_file_location("walk", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["walk"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["walk"]


@pytest.fixture(scope="module")
def walks(walk):
    with alone():
        return walk.walks()


@pytest.mark.parametrize(("kind", "modules", "stays"), [("step", 34, 175), ("commit", 26, 81), ("join", 48, 324)])
def test_a_walk_is_short(walks, kind, modules, stays):
    """Where one is longer for a reason, change the number here and in docs/architecture.md."""
    found = walks[kind]
    assert 10 < found.modules <= modules, found.lines()
    assert found.modules < found.stays <= stays, found.lines()


def test_a_return_into_a_module_is_a_stay(walk):
    visits = (("a.py", "f"), ("b.py", "g"), ("b.py", "h"), ("b.py", ""), ("a.py", ""))
    found = walk.Walk(visits)
    assert (found.modules, found.stays, found.calls) == (2, 3, 3)
    assert found.lines() == ["a.py: f", "b.py: g h"]
