"""The help of every command as a person reads it at 80 columns: whole sentences, examples that are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edl_hvd.cli.edlrun import _COMMAND
from edl_hvd.cli.main import commands

REPOSITORY = Path(__file__).parents[3]


def all_commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its words, groups included."""

    def below(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
        yield context.command_path, command, context
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from below(inner, click.Context(inner, context, name, **inner.context_settings))

    top = click.Context(commands, info_name="edl-hvd", **commands.context_settings)
    yield from below(commands, top)
    yield "edlrun", _COMMAND, click.Context(_COMMAND, info_name="edlrun", **_COMMAND.context_settings)


def text_of(command: click.Command, context: click.Context) -> str:
    context.terminal_width = 80
    return command.get_help(context)


everything = pytest.mark.parametrize(
    ("path", "command", "context"), [pytest.param(*each, id=each[0]) for each in all_commands()]
)


@everything
def test_it_fits_80_columns_and_no_summary_is_cut(path: str, command: click.Command, context: click.Context) -> None:
    text = text_of(command, context)
    assert max(map(len, text.splitlines())) <= 80
    summaries = text.partition("\nCommands:\n")[2].splitlines()
    assert [line for line in summaries if not line.endswith(".") or line.endswith("...")] == []


@everything
def test_every_option_is_explained(path: str, command: click.Command, context: click.Context) -> None:
    shown = [option for option in command.get_params(context) if isinstance(option, click.Option) and not option.hidden]
    assert [option.name for option in shown if not option.help] == []


@everything
def test_its_examples_are_understood(path: str, command: click.Command, context: click.Context) -> None:
    text = text_of(command, context)
    shown = re.findall(rf"^    ({path} .*)$", text, flags=re.MULTILINE)
    assert shown
    assert "  Examples:\n" in text
    for line in shown:
        if path == "edlrun":
            assert _COMMAND.make_context("edlrun", shlex.split(line)[1:]).params
            continue
        name, words = "edl-hvd", shlex.split(line)[1:]
        reached: click.Command = commands
        while isinstance(reached, click.Group) and not words[0].startswith("-"):
            name = words.pop(0)
            reached = reached.commands[name]
        reached.make_context(name, words)


@everything
def test_the_documents_that_it_names_exist(path: str, command: click.Command, context: click.Context) -> None:
    named = re.findall(r"docs/\w+\.md", text_of(command, context))
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
    if path.count(" ") < 2:
        assert named, "it says where to read more"
