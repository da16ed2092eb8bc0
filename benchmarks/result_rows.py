"""Rows of a CSV file to which a benchmark adds one for each thing that it has measured; a later run goes on with it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows that a file holds; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_row(path: Path, columns: Sequence[str], values: Sequence[object]) -> None:
    """Add a row to a file, which begins with the names of its columns, and print it."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(columns)
        writer.writerow(values)
    print(dict(zip(columns, values, strict=True)), flush=True)
