"""Show how a run of any job went, from its event log: tables of its resizes and its teachers, and a picture.

    EDL_HVD_EVENTS=events.jsonl edlrun -np 2 python train.py
    python examples/imagenet/show.py events.jsonl --picture report.png

Loss and accuracy are there if the job has called ``state.report(loss=…)``, and teachers if it has any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from picture import draw
from report import Report, summarize
from rich.console import Console
from screen import resize_table, teacher_table

from edl_hvd.events import read_events


def main() -> int:
    """Print the tables and draw the picture; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path, help="file that EDL_HVD_EVENTS named")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    parser.add_argument("--title", help="of the picture [the file's path]")
    arguments = parser.parse_args()
    try:
        lines = read_events(arguments.events)
    except (OSError, ValueError) as error:
        print(f"error: {arguments.events} is not an event log: {error}", file=sys.stderr)
        return 2
    report = summarize(lines)
    if not report.sizes:
        print(f"error: {arguments.events} tells of no world; expected the log of a job that trained", file=sys.stderr)
        return 2
    show_report(Console(), report)
    if arguments.picture is not None:
        draw(report, arguments.picture, arguments.title or str(arguments.events))
        print(f"Picture  {arguments.picture}")
    return 0


def show_report(console: Console, report: Report) -> None:
    """Print the tables."""
    console.print(resize_table(report))
    if report.teachers is not None:
        console.print(teacher_table(report.teachers))


if __name__ == "__main__":
    sys.exit(main())
