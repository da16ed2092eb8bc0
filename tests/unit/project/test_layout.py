"""Where tests lie."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import edl_hvd

TESTS = Path(__file__).parents[3] / "tests"
PACKAGE = Path(edl_hvd.__file__).parent
# Folders of unit tests that are no folders of the package.
OTHERS = {"examples", "project"}


def test_folders_of_unit_tests_are_folders_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS / "unit").as_posix() for path in TESTS.glob("unit/**/test_*.py")}
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    assert folders - packages == OTHERS


def test_no_two_modules_of_tests_have_one_name() -> None:
    """They import each other by bare name."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in names.items() if count > 1] == []
