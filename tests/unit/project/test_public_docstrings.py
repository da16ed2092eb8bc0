"""The docstring of every public name is complete, and true of the signature."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import edl_hvd
from edl_hvd import errors

# Made by the package alone, so that nobody passes arguments to them.
NOT_MADE_BY_SCRIPTS = {"Step"}
WITH_NUMBERS = ("ElasticBatchSampler", "EvaluationSampler", "GlobalBatch", "GroupedOrder", "WeightedOrder",
                "WorkerBatch", "metrics.AUC", "metrics.Accuracy", "metrics.Max", "metrics.Mean", "metrics.Min",
                "metrics.Sum", "schedule")  # fmt: skip
SECTIONS = ("Args", "Attributes", "Returns", "Raises")
WHO = re.compile(r"\b(not collective|collective|every rank|any rank)\b", re.IGNORECASE)
NOUN = re.compile(r"(The|A|An|Whether) ")


@dataclasses.dataclass(frozen=True)
class Documented:
    """Something public with a docstring.

    Attributes:
        name: As a script writes it, without ``edl_hvd.``.
        module: Of its definition.
        text: Its docstring, without indentation.
        parameters: Names of what a caller passes, with their stars.
        returns: Its return annotation; "None" for a class.
        source: The function, or ``__init__`` of the class, where there is one of this package.
        is_property: It is read, not called.
    """

    name: str
    module: str
    text: str
    parameters: tuple[str, ...] = ()
    returns: str = "None"
    source: Callable[..., Any] | None = None
    is_property: bool = False


def of_function(name: str, function: Callable[..., Any], text: str, is_property: bool = False) -> Documented:
    function = inspect.unwrap(function)
    signature = inspect.signature(function)
    stars = {inspect.Parameter.VAR_POSITIONAL.name: "*", inspect.Parameter.VAR_KEYWORD.name: "**"}
    named = [f"{stars.get(one.kind.name, '')}{one.name}" for one in signature.parameters.values() if one.name != "self"]
    returns = "None" if signature.return_annotation is inspect.Signature.empty else str(signature.return_annotation)
    return Documented(name, function.__module__, text, tuple(named), returns, function, is_property)


def of_class(name: str, kind: type) -> Iterator[Documented]:
    text = inspect.getdoc(kind) or ""
    own = getattr(kind.__init__, "__module__", "").startswith("edl_hvd.")
    if own and name not in NOT_MADE_BY_SCRIPTS:
        made = of_function(name, kind.__init__, text)
        yield Documented(name, kind.__module__, text, made.parameters, source=kind.__init__)
    else:
        yield Documented(name, kind.__module__, text)
    for member, value in vars(kind).items():
        documented = inspect.getdoc(getattr(kind, member)) or ""  # where it overrides: perhaps that of its base
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            assert value.fget is not None
            yield of_function(f"{name}.{member}", value.fget, documented, is_property=True)
        elif inspect.isfunction(value):
            yield of_function(f"{name}.{member}", value, documented)


def public(home: ModuleType, names: list[str], prefix: str = "") -> Iterator[Documented]:
    for name in names:
        value = getattr(home, name)
        if isinstance(value, ModuleType):
            inside = getattr(value, "__all__", None) or [
                one for one, kind in vars(value).items() if isinstance(kind, type) and kind.__module__ == value.__name__
            ]
            yield Documented(name, value.__name__, inspect.getdoc(value) or "")
            yield from public(value, inside, f"{name}.")
        elif isinstance(value, type):
            yield from of_class(prefix + name, value)
        else:
            yield of_function(prefix + name, value, inspect.getdoc(inspect.unwrap(value)) or "")


PUBLIC = {one.name: one for one in public(edl_hvd, [name for name in edl_hvd.__all__ if name != "__version__"])}
every = pytest.mark.parametrize("documented", PUBLIC.values(), ids=PUBLIC)


def section(text: str, title: str) -> list[str]:
    """Names that a section explains; ``[""]`` if it is plain text, nothing if it is not there."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n?|\n(?=[ ]))+)", text, flags=re.MULTILINE)
    return [] if found is None else re.findall(r"^    (\*{0,2}\w+):", found[1], flags=re.MULTILINE) or [""]


def raised_directly(function: Callable[..., Any]) -> set[type]:
    """The package's errors that a function raises itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # made by ``dataclass``
        return set()
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = [call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    kinds = [vars(sys.modules[function.__module__]).get(name) for name in names]
    return {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, errors.EdlHvdError)}


def faults(documented: Documented) -> list[str]:
    """What the docstring lacks, or says of something that is not there."""
    text, found = documented.text, []
    if not text.strip():
        return ["it has no docstring"]
    explained = [*section(text, "Args"), *(section(text, "Attributes") if documented.returns == "None" else [])]
    missing = [name for name in documented.parameters if name not in explained]
    unknown = [name for name in section(text, "Args") if name not in documented.parameters]
    found += [f"Args lacks {name}" for name in missing] + [f"Args has {name!r}, no parameter" for name in unknown]
    if documented.returns not in ("None", "NoReturn") and not NOUN.match(text) and not section(text, "Returns"):
        found.append("it has no Returns, and its first line begins with neither The, A, An nor Whether")
    if documented.module.startswith("edl_hvd.worker") and not documented.is_property and not WHO.search(text):
        found.append("it says neither whether it is collective, nor which ranks call it")
    known = {**vars(builtins), **vars(errors)}
    named = [known.get(name) for name in section(text, "Raises")]
    kinds = [kind for kind in named if isinstance(kind, type) and issubclass(kind, BaseException)]
    if len(kinds) < len(named):
        found.append(f"Raises names what is no error: {section(text, 'Raises')}")
    elif documented.source is not None:
        ours = tuple(kind for kind in kinds if issubclass(kind, errors.EdlHvdError))
        raised = raised_directly(documented.source)
        found += [f"Raises lacks {kind.__name__}" for kind in raised if not issubclass(kind, ours)]
    return found


@every
def test_a_public_docstring_is_complete(documented: Documented) -> None:
    assert faults(documented) == []


def test_every_public_name_is_looked_at() -> None:
    assert {name.split(".")[0] for name in PUBLIC} == set(edl_hvd.__all__) - {"__version__"}
    assert {"State.commit", "Step.weigh", "GradScaler.update", "metrics.Mean.update", "errors.UsageError"} < set(PUBLIC)


def collective(tensor: int, *rest: int, **named: int) -> int:
    """Add. Collective.

    Args:
        tensor: Number.
        *rest: Numbers.
        **named: Numbers.

    Returns:
        The sum.

    Raises:
        UsageError: Always.
    """
    raise errors.UsageError("")


@pytest.mark.parametrize(
    ("removed", "instead", "fault"),
    [
        ("", "", ""),
        ("        tensor: Number.\n", "", "Args lacks tensor"),
        ("**named", "named", "Args lacks **named"),
        ("*rest: Numbers.", "*rest: Numbers.\n        more: Numbers.", "Args has 'more', no parameter"),
        ("    Returns:\n        The sum.\n", "", "it has no Returns"),
        ("Collective", "Fast", "it says neither"),
        ("UsageError", "UsageFault", "Raises names what is no error"),
    ],
)
def test_the_rule_sees_what_was_removed(removed: str, instead: str, fault: str) -> None:
    assert collective.__doc__ is not None
    assert removed in collective.__doc__
    text = inspect.cleandoc(collective.__doc__.replace(removed, instead, 1) if removed else collective.__doc__)
    given = of_function("collective", collective, text)
    found = faults(dataclasses.replace(given, module="edl_hvd.worker", source=None))
    assert any(one.startswith(fault) for one in found) if fault else found == []


def test_the_rule_sees_an_error_that_a_function_raises() -> None:
    documented = PUBLIC["ElasticBatchSampler.load_state_dict"]
    text = documented.text.partition("Raises:")[0]
    assert faults(dataclasses.replace(documented, text=text)) == ["Raises lacks StateError"]


def test_the_docstring_of_state_names_what_attributes_cannot_be_called() -> None:
    own = {name for name in dir(edl_hvd.State) if not name.startswith("_")}
    assert own - set(re.findall(r"``(\w+)``", inspect.getdoc(edl_hvd.State) or "")) == set()


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_docstring_about_numbers_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(PUBLIC[name].text) != []
