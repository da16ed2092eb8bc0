"""``edl-hvd doctor``: the findings as a list or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edl_hvd.doctor.examination import examine
from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult
from edl_hvd.settings import process_environment

_SUBJECT_WIDTH = 12
# Characters of the longest subject, "C++ compiler": rows are printed one by one and have to line up.
_MARKS = {OK: "[green]✓[/]", MISSING: "[bold red]✗[/]", ADVICE: "[yellow]![/]"}


@click.command("doctor")
@click.option("--checkpoint", metavar="URL", help="Also write, read and delete a small object at URL.")
@click.option("--discovery-script", metavar="COMMAND", help="Also run COMMAND once and check its answer.")
@click.option(
    "--discover", metavar="SOURCE", help="Also ask SOURCE of 'edlrun --discover', and list missing permissions."
)
@click.option(
    "--kubernetes", is_flag=True, help="Also look at the cluster of your kubeconfig: operator, resources, your rights."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor_command(
    checkpoint: str | None, discovery_script: str | None, discover: str | None, kubernetes: bool, as_json: bool
) -> None:
    """Check this installation, and say how to mend each gap.

    \b
    Examples:
      edl-hvd doctor
      edl-hvd doctor --checkpoint s3://bucket/run
      edl-hvd doctor --discover ec2:tag=job=resnet50
      edl-hvd doctor --kubernetes

    Exit code 1 when something is missing that training on this machine, or what was asked for, needs. Documents:
    docs/build.md, docs/discovery.md and docs/kubernetes.md.
    """
    findings = examine(process_environment(), checkpoint, discovery_script, discover)
    if kubernetes:
        from edl_hvd.kubernetes.checks import check_cluster

        findings = chain(findings, check_cluster())
    shown = _show_json(findings) if as_json else _show_list(findings)
    sys.exit(any(finding.verdict == MISSING for finding in shown))


def _show_json(findings: Iterable[CheckResult]) -> list[CheckResult]:
    shown = list(findings)
    click.echo(json.dumps([asdict(finding) for finding in shown], indent=2))
    return shown


def _show_list(findings: Iterable[CheckResult]) -> list[CheckResult]:
    console = Console(highlight=False)
    shown: list[CheckResult] = []
    with console.status("Looking around"):
        for finding in findings:
            if not shown or shown[-1].group != finding.group:
                console.print(f"\n  [bold]{finding.group}[/]")
            console.print(_row(finding))
            shown.append(finding)
    console.print(_summary(shown))
    return shown


def _row(finding: CheckResult) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=_SUBJECT_WIDTH)
    row.add_column(overflow="fold")
    row.add_row(_MARKS[finding.verdict], finding.subject, escape(finding.found))
    if finding.fix:
        row.add_row("", "", f"[cyan]→ {escape(finding.fix)}[/]")
    return row


def _summary(findings: list[CheckResult]) -> str:
    missing = sum(finding.verdict == MISSING for finding in findings)
    advice = sum(finding.verdict == ADVICE for finding in findings)
    if missing:
        return f"\n[bold red]{missing} missing[/] for training on this machine; the arrows say what to do"
    remarks = f", {advice} to improve" if advice else ""
    return f"\n[bold green]Ready to train[/]{remarks}"
