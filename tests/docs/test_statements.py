"""What the documents state about files, variables, defaults, names and events is so."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import signal

import pytest
from documents import (
    DOCUMENTS,
    REPOSITORY,
    SCRIPTS,
    commands_of_markdown,
    commands_outside_console_blocks,
    links,
    prose,
    table,
)

import edl_hvd
import edl_hvd.events as events
from edl_hvd.driver.job import INTERRUPTED
from edl_hvd.driver.membership.transition import SAVED
from edl_hvd.settings import FORMER_VARIABLES, Settings
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL

EVERYTHING = "\n".join(path.read_text() for path in DOCUMENTS)
VARIABLE = re.compile(r"\bEDL_HVD_[A-Z0-9_]*[A-Z0-9]\b")
# Of one part of the package to another; not for users.
INTERNAL_VARIABLES = {"EDL_HVD_CPU_ONLY", "EDL_HVD_CXX_STANDARD", "EDL_HVD_DRIVER_ADDRESS",
                      "EDL_HVD_DRIVER_TOKEN", "EDL_HVD_FAMILY_TIMINGS"}  # fmt: skip

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@documents
def test_every_link_leads_to_a_file(document):
    missing = [link for link in links(document.read_text()) if not (document.parent / link).exists()]
    assert missing == []


@documents
def test_every_file_of_the_project_that_is_named_exists(document):
    """A path in code type that begins with a folder of the project, or ends like its files."""
    words = re.findall(r"`([\w./-]+)`", prose(document.read_text()))
    folders = ("edl_hvd/", "docs/", "examples/", "tests/", "benchmarks/", "discovery_scripts/", ".ci/")
    paths = [word for word in words if word.startswith(folders)]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    names = [word for word in words if re.fullmatch(r"[a-z_]+\.(py|cmake|sh)", word)]
    ours = {path.name for folder in ("edl_hvd", "examples", "tests", "benchmarks", "discovery_scripts")
            for path in (REPOSITORY / folder).rglob("*")}  # fmt: skip
    assert [name for name in names if name not in ours | {"train.py"}] == []
    modules = [word for word in words if re.fullmatch(r"(?:\w+/)+\w+\.py", word) and not word.startswith("torch/")]
    assert [name for name in modules if not any((REPOSITORY / top / name).exists() for top in ("", "edl_hvd"))] == []


def test_every_class_that_the_architecture_names_exists():
    text = prose((REPOSITORY / "docs" / "architecture.md").read_text())
    words = re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", text)
    source = "\n".join(path.read_text() for path in (REPOSITORY / "edl_hvd").rglob("*.py"))
    assert len(words) > 20
    assert {name for name, _ in words} - {"None"} - set(re.findall(r"\bclass (\w+)", source)) == set()
    parts = {*re.findall(r"\bdef (\w+)", source), *re.findall(r"^    (\w+):", source, flags=re.MULTILINE)}
    assert {part for _, part in words if part} - parts == set()


@documents
def test_commands_stand_in_console_blocks(document):
    assert commands_outside_console_blocks(document.read_text()) == [], (
        "write a command as a ```console block, with '$ ' before it; there a test sees that it is run"
    )


def test_every_variable_is_documented_and_every_documented_variable_exists():
    sources = [*(REPOSITORY / "edl_hvd").rglob("*.py"), *(REPOSITORY / "edl_hvd").rglob("*.cmake")]
    read = {name for path in [*sources, *SCRIPTS, *(REPOSITORY / "discovery_scripts").glob("*.sh")]
            for name in VARIABLE.findall(path.read_text())}  # fmt: skip
    manuals = "\n".join(path.read_text().partition("\nset -eu")[0] for path in SCRIPTS)
    documented = set(VARIABLE.findall(EVERYTHING + manuals))
    assert documented & FORMER_VARIABLES.keys() == set(), "the documents show the present names"
    assert documented - read == set(), "documented, but nothing reads them"
    assert read - documented - INTERNAL_VARIABLES == FORMER_VARIABLES.keys(), "read, but not documented"


def test_every_extra_that_is_named_exists():
    """pip installs the package without an extra that it does not know, and only warns."""
    named: dict[str, set[str]] = {}
    for path in [
        *DOCUMENTS,
        REPOSITORY / "Dockerfile",
        REPOSITORY / "Makefile",
        *(REPOSITORY / "edl_hvd").rglob("*.py"),
    ]:
        for extras in re.findall(r"(?:edl-hvd|['\"]\.)\[([\w,-]+)\]", path.read_text()):
            for extra in extras.split(","):
                named.setdefault(extra, set()).add(path.name)
    assert len(named) > 5
    known = importlib.metadata.metadata("edl-hvd").get_all("Provides-Extra")
    assert {extra: where for extra, where in named.items() if extra not in known} == {}


def test_the_table_of_settings_is_that_of_the_code():
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    of_variable = {"EDL_HVD_JOIN_TIMEOUT": "join_timeout_s", "HOROVOD_ELASTIC_TIMEOUT": "elastic_timeout_s",
                   "EDL_HVD_TERMINATION_GRACE": "termination_grace_s", "EDL_HVD_NOTICES": "notices",
                   "EDL_HVD_COLLECTIVE_TIMEOUT": "collective_timeout_s",
                   "EDL_HVD_RESTART_LOST_PROGRESS": "restart_lost_progress"}  # fmt: skip
    documented = set()
    for argument, variable, default, _ in table((REPOSITORY / "docs" / "settings.md").read_text(), "argument"):
        variable, default = variable.strip("`"), default.strip("`")
        if variable == "HOROVOD_GLOO_TIMEOUT_SECONDS":
            continue  # Horovod's own; the table says so.
        name = argument.strip("`") or of_variable[variable]
        documented.add(name)
        environment = {} if default == "none" else {variable: default}
        told = getattr(Settings.from_environment(environment), name)
        assert told == fields[name].default == getattr(Settings(), name), f"default of {name}"
        if default != "none":
            other = {"EDL_HVD_CHECKPOINT_EVERY": "7s", "EDL_HVD_JOIN_TIMEOUT": "7s"}.get(variable, "1")
            other = {"warn": "stop", "auto": "off"}.get(told, other) if isinstance(told, str) else other
            other = "7" if told == 1 and not isinstance(told, bool) else other
            assert getattr(Settings.from_environment({variable: other}), name) != told, f"{variable} does nothing"
    assert documented == set(fields)


def test_the_table_of_exit_codes_has_those_of_the_code():
    rows = table((REPOSITORY / "docs" / "settings.md").read_text(), "code")
    ours = {0, 1, 2, SAVED, EX_TEMPFAIL, INTERRUPTED, 128 + signal.SIGTERM}
    assert {int(code) for code, _, _ in rows if code} == ours


def test_the_readme_is_short_and_shows_edlrun():
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    shown = list(commands_of_markdown(text))
    assert sum(command.startswith("edlrun ") for command in shown) >= 3
    assert [command for command in shown if command.startswith("horovodrun ")] == [], "these are in docs/horovodrun.md"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_lines_are_short_but_for_tables_links_and_commands(name):
    lines = (REPOSITORY / name).read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "$ ")) and "](" not in line] == []


def test_the_glossary_is_short_and_names_counterparts():
    rows = table((REPOSITORY / "docs" / "glossary.md").read_text(), "word")
    words = [row[0] for row in rows]
    assert len(words) == len(set(words)) <= 40
    assert [row[0] for row in rows if len(row) != 5 or not all(cell.strip() for cell in row)] == []


def test_every_public_name_is_in_the_reference():
    rows = table((REPOSITORY / "docs" / "reference.md").read_text(), "`edl_hvd.`")
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert documented == set(edl_hvd.__all__)


def test_every_documented_attribute_of_the_state_exists():
    rows = table((REPOSITORY / "docs" / "reference.md").read_text(), "`state.`")
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert {name for name in documented if not hasattr(edl_hvd.State, name)} == set()


def test_the_table_of_events_is_that_of_the_code():
    rows = table((REPOSITORY / "docs" / "reference.md").read_text(), "`event`")
    documented = {row[0].strip("`"): re.findall(r"`(\w+)`", row[2]) for row in rows}
    kinds = [value for value in vars(events).values() if isinstance(value, type) and issubclass(value, events.Event)]
    written = {kind.kind: [field.name for field in dataclasses.fields(kind)] for kind in kinds if kind.kind}
    assert documented == written


def test_every_test_and_every_row_of_a_benchmark_that_is_named_exists():
    text = (REPOSITORY / "docs" / "stock_horovod.md").read_text()
    sources = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    tests = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, flags=re.MULTILINE)}
    with_stock = {
        name
        for source in sources
        for name in re.findall(r"@fails_on_stock\(.*\n(?:@.*\n)*def (test_\w+)", source)
    }  # fmt: skip
    cases = set(re.findall(r'Case\("([\w-]+)"', (REPOSITORY / "benchmarks" / "fault_cases.py").read_text()))
    assert set(re.findall(r"`(test_\w+)`", text)) - tests == set()
    assert set(re.findall(r"\*`(test_\w+)`\*", text)) == with_stock, "in italics, if and only if it has a stock variant"
    assert set(re.findall(r"\*\*([\w-]+)\*\*", text)) == cases


@pytest.mark.parametrize(
    ("document", "folder"), [("architecture.md", "edl_hvd"),
                             *(("architecture.md", f"edl_hvd/worker/{room}")
                               for room in ("", "joining", "engine", "training", "commits", "standby", "saving")),
                             *(("edlrun.md", f"edl_hvd/driver/{room}")
                               for room in ("", "membership", "workers", "watch", "job_folder", "command_line")),
                             ("imagenet.md", "examples/imagenet"), ("testing.md", "tests"),
                             ("benchmarks.md", "benchmarks")],
)  # fmt: skip
def test_every_module_of_a_folder_has_its_place_in_the_document(document, folder):
    text = (REPOSITORY / "docs" / document).read_text()
    modules = [path for path in (REPOSITORY / folder).iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    modules = [path for path in modules if path.name not in ("__init__.py", "conftest.py")]
    names = {path: (path.name, path.stem, f"{path.name}/", f"{folder}/{path.name}") for path in modules}
    missing = [path.name for path, forms in names.items() if not any(f"`{form}`" in text for form in forms)]
    assert missing == []
