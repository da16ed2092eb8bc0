"""The page of all bounds has the values of the code, and no bound that a user can set is missing from it."""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from edl_hvd.driver.command_line.options import Options
from edl_hvd.driver.membership.state import Rules
from edl_hvd.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "bounds.md"
UNITS_S = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Row:
    """One bound on the page: what, for how many seconds, which setting changes it, and its name in the code."""

    what: str
    duration_s: float
    setting: str
    name: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "what":
            match = re.fullmatch(r"([0-9.]+) (ms|s|min|h|d)", cells[1])
            assert match, f"{cells[1]!r} is no time"
            found.append(Row(cells[0], float(match[1]) * UNITS_S[match[2]], cells[3], cells[4].strip("`")))
    return found


def value_of(name: str) -> float:
    """Seconds of a constant of a module, of an entry of one, or of the default of a class's field."""
    path, _, entry = name.rstrip("]").partition("[")
    parts = path.split(".")
    owner = parts[-2]
    if owner[0].isupper():
        kind = getattr(importlib.import_module(f"edl_hvd.{'.'.join(parts[:-2])}"), owner)
        [field] = [field for field in dataclasses.fields(kind) if field.name == parts[-1]]
        found: Any = field.default
    else:
        found = getattr(importlib.import_module(f"edl_hvd.{'.'.join(parts[:-1])}"), parts[-1])
    found = found[entry] if entry else found
    return found.total_seconds() if isinstance(found, timedelta) else float(found)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_bound_on_the_page_is_that_of_the_code(row: Row) -> None:
    assert value_of(row.name) == pytest.approx(row.duration_s)


@pytest.mark.parametrize("kind", [Settings, Rules, Options], ids=lambda kind: kind.__name__)
def test_every_time_that_can_be_set_is_on_the_page(kind: type) -> None:
    there = {row.name.rpartition(".")[2] for row in rows() if f".{kind.__name__}." in row.name}
    timed = {field.name for field in dataclasses.fields(kind) if field.name.endswith("_s")}
    assert timed - {"poll_every_s"} == there, "how often a source is asked bounds nothing"


def test_the_page_names_settings_that_exist() -> None:
    """Flags of ``edlrun``, and variables that the settings read."""
    from edl_hvd.driver.command_line import options
    from edl_hvd.settings import _VARIABLES

    source = Path(options.__file__).read_text()
    for row in rows():
        for word in re.findall(r"`([^`]+)`", row.setting):
            known = word in _VARIABLES or f'"{word}"' in source or word == "AWS_MAX_ATTEMPTS"
            assert known, f"{row.what}: there is no {word}"


def test_each_bound_stands_there_once() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names)) > 40
