"""What the documents show: their commands, links, names and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SCRIPTS = sorted(path for path in (REPOSITORY / "discovery_scripts").iterdir() if path.suffix == "")

# A line of code that begins with one of these is a command.
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:make|pip|python3?|edlrun -np|horovodrun|mpirun|srun|edl-hvd|docker|discovery_scripts/\S+) "
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", flags=re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A command and the document that shows it; continuation lines are joined."""

    document: str
    command: str


def commands() -> list[Shown]:
    """Every command in the ``console`` blocks and code words of the documents and in the headers of the scripts."""
    shown = [Shown(path.name, command) for path in DOCUMENTS for command in commands_of_markdown(path.read_text())]
    for path in SCRIPTS:
        header = path.read_text().partition("\nset -eu")[0]
        lines = (line.removeprefix("#").strip() for line in header.splitlines())
        shown += [Shown(path.name, line) for line in lines if line.startswith("horovodrun ")]
    return shown


def commands_of_markdown(text: str) -> Iterator[str]:
    """Commands of its ``console`` blocks, then those in the running text."""
    for language, block in FENCE.findall(text):
        if language == "console":
            joined = re.sub(r" *\\\n *", " ", block)
            yield from (line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ "))
    yield from (word for word in re.findall(r"`([^`\n]+)`", prose(text)) if PROGRAM.match(word))


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return INDENTED.sub("", FENCE.sub("", text))


def commands_outside_console_blocks(text: str) -> list[str]:
    """Lines of other blocks that look like commands, where no test would see them."""
    blocks = [block for language, block in FENCE.findall(text) if language != "console"]
    blocks += INDENTED.findall(FENCE.sub("", text))
    return [line for block in blocks for line in block.splitlines() if PROGRAM.match(line.strip())]


def links(text: str) -> list[str]:
    """Relative targets, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:", target) and target[0] != "#"]


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows below the table head whose first cell is ``first_column``, as lists of cells."""
    head = next(line for line in text.splitlines() if line.startswith(f"| {first_column} |"))
    rows = text.partition(head)[2].splitlines()[2:]
    end = next((number for number, row in enumerate(rows) if not row.startswith("|")), len(rows))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[:end]]


def diff_sides(text: str) -> tuple[str, str]:
    """The script before and after the first diff of a document."""
    block = next(block for language, block in FENCE.findall(text) if language == "diff")
    before = [line[1:] for line in block.splitlines() if not line.startswith("+")]
    after = [line[1:] for line in block.splitlines() if not line.startswith("-")]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"
