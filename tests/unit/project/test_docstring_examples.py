"""The examples in all docstrings of the package, those that no script sees included."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import edl_hvd

PACKAGE = Path(edl_hvd.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_there_are_examples() -> None:
    assert "edl_hvd.hosts" in MODULES
    assert "edl_hvd.storage.parts" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
