"""``edl-hvd teachers``: the teachers of a source, and how each of them stands."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edl_hvd.cli.formatting import count, duration, pace
from edl_hvd.distill.asking import ask, describe_model
from edl_hvd.distill.conversation import Address, TeacherStatus
from edl_hvd.distill.finding import DEFAULT_PORT, addresses_of, read_teachers
from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.open_inference import ModelUrl, is_inference_source, read_models
from edl_hvd.settings import TeacherSettings
from edl_hvd.tls import client_context

NO_TEACHER, WRONG_ARGUMENTS = 1, 2
_AT_ONCE = 32
_REDRAW_S = 1.0


@dataclass(frozen=True)
class TeacherListing:
    """An address, and how the teacher there stands, what a server there says of its model, or why there is none."""

    address: Address
    status: TeacherStatus | None = None
    problem: str = ""
    served: str = ""

    @property
    def is_there(self) -> bool:
        return self.status is not None or bool(self.served)


@click.command("teachers")
@click.argument("source", required=False)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of the first teacher of each host.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="File that holds the token. [EDL_HVD_TEACHERS_TOKEN, or EDL_HVD_TEACHERS_TOKEN_FILE]",
)
@click.option(
    "--tls-ca",
    metavar="FILE",
    default=None,
    help="Certificates of the CAs that teachers are verified by, or 'system'. [EDL_HVD_TEACHERS_TLS_CA]",
)
@click.option("--watch", is_flag=True, help="Ask again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch one line for each answer.")
def teachers_command(
    source: str | None, port: int, token_file: str | None, tls_ca: str | None, watch: bool, as_json: bool
) -> None:
    """Show the teachers of SOURCE, and how each of them stands.

    SOURCE is what edlrun --teachers takes: file:teachers.txt, ec2:tag=role=teacher; a host's slots are its teachers.
    Or models on servers of the Open Inference Protocol: oip:http://host:8000/MODEL. Left out, it is EDL_HVD_TEACHERS.

    \b
    Examples:
      edl-hvd teachers file:teachers.txt
      edl-hvd teachers file:teachers.txt --watch

    Exit code 0: a teacher answers. 1: none does. 2: SOURCE is not understood. Documents: docs/distillation.md.
    """
    settings = TeacherSettings.from_environment()
    try:
        text = source or settings.source
        if not text:
            raise UsageError(
                "no SOURCE was given, and EDL_HVD_TEACHERS is not set; expected one, such as file:teachers.txt"
            )
        models = read_models(text) if is_inference_source(text) else ()
        question = None if models else read_teachers(text)
        authority = tls_ca or settings.tls_ca
        context = client_context(authority) if authority else None
        token = _read_token(token_file or settings.token_file, settings.token if not token_file else "")
    except UsageError as error:
        click.echo(f"edl-hvd teachers: {' '.join(str(error).split())}", err=True)
        sys.exit(WRONG_ARGUMENTS)
    code = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                asked = (
                    ask_all(addresses_of(question.source.answer().hosts, port), token, context)
                    if question is not None
                    else ask_servers(models, context)
                )
            except EdlHvdError as error:
                click.echo(f"edl-hvd teachers: {' '.join(str(error).split())}", err=True)
                asked = ()
            code = 0 if any(one.is_there for one in asked) else NO_TEACHER
            _print(asked, as_json, watch)
            if not watch:
                break
            time.sleep(_REDRAW_S)
    if question is not None:
        question.source.close()
    sys.exit(code)


def _read_token(token_file: str, token: str) -> str:
    if token or not token_file:
        return token
    try:
        with open(token_file, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token from {token_file!r}: {error}") from error


def ask_all(
    addresses: Sequence[Address], token: str, context: ssl.SSLContext | None = None
) -> tuple[TeacherListing, ...]:
    """How the teachers at these addresses stand; each is asked once, several at a time. Blocks."""

    def one(address: Address) -> TeacherListing:
        try:
            return TeacherListing(address, ask(address, token, context=context))
        except EdlHvdError as error:
            return TeacherListing(address, problem=" ".join(str(error).split()))

    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(addresses)))) as threads:
        return tuple(threads.map(one, addresses))


def ask_servers(models: Sequence[ModelUrl], context: ssl.SSLContext | None = None) -> tuple[TeacherListing, ...]:
    """What servers of the Open Inference Protocol say of their models. Blocks."""

    def one(model: ModelUrl) -> TeacherListing:
        address = Address(model.host, model.port)
        try:
            return TeacherListing(address, served=describe_model(model, context))
        except EdlHvdError as error:
            return TeacherListing(address, problem=" ".join(str(error).split()))

    with ThreadPoolExecutor(min(_AT_ONCE, len(models))) as threads:
        return tuple(threads.map(one, models))


def _print(asked: Sequence[TeacherListing], as_json: bool, is_line: bool) -> None:
    if as_json:
        document = {"teachers": [_to_json(one) for one in asked]}
        click.echo(json.dumps(document, indent=None if is_line else 2))
        return
    console = Console(highlight=False)
    if asked:
        console.print(_table(asked))
    ready = [one.status for one in asked if one.status]
    total = sum(status.samples_per_s for status in ready)
    there = sum(one.is_there for one in asked)
    console.print(f"[bold]{there} of {count(len(asked), 'teacher')}[/]" + (f" · {pace(total)}" if ready else ""))


def _to_json(one: TeacherListing) -> dict[str, object]:
    status = asdict(one.status) if one.status else {}
    status |= {"model": one.served} if one.served else {}
    return {"address": str(one.address), **status, **({"problem": one.problem} if one.problem else {})}


def _table(asked: Sequence[TeacherListing]) -> Table:
    """A row for each address; columns of which nothing is known are not shown."""
    names = ("teacher", "model", "weights", "age", "students", "waiting", "samples", "samples/s", "last fault")
    rows: list[tuple[str, ...]] = []
    for one in asked:
        status = one.status
        if one.served:
            rows.append((escape(str(one.address)), escape(one.served), *[""] * 7))
            continue
        if status is None:
            rows.append((escape(str(one.address)), *[""] * 7, f"[red]{escape(one.problem)}[/]"))
            continue
        name = status.model + (" (leaving)" if status.is_leaving else "")
        row = (str(one.address), name, status.fingerprint[:8], duration(status.age_s), str(status.students),
               str(status.waiting), f"{status.samples:,}", f"{status.samples_per_s:,.0f}",
               status.last_fault)  # fmt: skip
        rows.append(tuple(escape(cell) for cell in row))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    shown = [number for number in range(len(names)) if any(row[number] for row in rows)]
    for number in shown:
        is_text = names[number] in ("teacher", "model", "weights", "last fault")
        table.add_column(names[number], justify="left" if is_text else "right", overflow="fold")
    for cells in rows:
        table.add_row(*(cells[number] for number in shown))
    return table
