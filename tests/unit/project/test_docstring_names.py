"""What the package's docstrings name exists: files, modules, classes and their members."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import edl_hvd

PACKAGE = Path(edl_hvd.__file__).parent
REPOSITORY = PACKAGE.parent

# ``driver/job.py``, ``history.replay``, ``State.evaluate``, ``state.batches``, ``torch.save``, ``time.monotonic()``
NAME = re.compile(r"``(?!self\.)([A-Za-z_][\w./]*[./][\w.]+)(?:\(\))?``")
ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
FILE_SUFFIXES = (".py", ".md", ".toml", ".cfg")
# Written by programs, or parts of other projects; nothing here to compare them with.
FOREIGN_FILES = {"json", "jsonl", "sh", "so", "pkl", "crt", "h", "hpp", "cc", "pt", "safetensors", "jpg", "png"}

STANDS_FOR = {
    "hvd": "horovod.torch",
    "model": "torch.nn.Module",
    "optimizer": "torch.optim.Optimizer",
    "parameter": "torch.nn.Parameter",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "safe_shell_exec": "horovod.runner.common.util.safe_shell_exec",
    "AWSConnection": "botocore.awsrequest.AWSConnection",
}
PLACEHOLDERS = {
    "setup.py": "Horovod's",
    "edl_hvd.name": "any name",
    "edl_hvd.elastic.name": "any name",
}


class Sources:
    """The names that the package's sources define."""

    def __init__(self) -> None:
        self.paths = sorted(PACKAGE.rglob("*.py"))
        self.trees = {path: ast.parse(path.read_text()) for path in self.paths}
        self.of_module: dict[str, set[str]] = {}
        self.of_class: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        for path, tree in self.trees.items():
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            self.of_module[".".join(parts).removesuffix(".__init__")] = defined_in(tree.body)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.of_class[node.name] |= defined_in(node.body) | set(fields_of(node))
                    self.bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}

    def docstrings(self) -> Iterator[tuple[Path, str]]:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    yield path, text

    def members(self, name: str) -> set[str]:
        return self.of_class[name].union(*(self.members(base) for base in self.bases[name] if base in self.of_class))

    def has(self, name: str) -> bool:
        """``name`` is a module, or something in one, or a member of a class; the front may be left out."""
        head, _, last = name.rpartition(".")
        modules = [module for module in self.of_module if f".{module}".endswith(f".{head}")]
        if any(f".{module}".endswith(f".{name}") for module in self.of_module):
            return True
        if any(last in self.of_module[module] for module in modules):
            return True
        owner = head.rpartition(".")[2]
        # An object is called by its class: ``record.asked_s``.
        named = [kind for kind in list(self.of_class) if owner in (kind, snake(kind))]
        return any(last in self.members(kind) for kind in named)


def defined_in(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(name.asname or name.name) for name in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, (ast.If, ast.Try)):
            names |= defined_in([*node.body, *node.orelse])
    return names


def fields_of(kind: ast.ClassDef) -> Iterator[str]:
    """Attributes that its methods set."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def snake(name: str) -> str:
    """
    >>> snake("HostWatch")
    'host_watch'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("_")).lower()


def is_elsewhere(name: str) -> bool:
    """Something of a library, or what ``edl_hvd`` exports."""
    first, _, rest = name.partition(".")
    parts = f"{STANDS_FOR.get(first, first)}.{rest}".split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except (ImportError, AttributeError, ValueError):
            continue
        found: object = importlib.import_module(module) if parts[count:] else None
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def is_file(name: str) -> bool:
    """A path from the repository's root, or the end of one in the package, or one of an installed library."""
    if (REPOSITORY / name).exists() or any(f"/{path.as_posix()}".endswith(f"/{name}") for path in sources().paths):
        return True
    folder = name.partition("/")[0]
    spec = importlib.util.find_spec(folder) if folder.isidentifier() else None
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return any((Path(place).parent / name).exists() for place in places)


@functools.cache
def sources() -> Sources:
    """Read once, and only where a test of this module runs."""
    return Sources()


def resolves(name: str) -> bool:
    if name.endswith(FILE_SUFFIXES):
        return name in PLACEHOLDERS or is_file(name)
    if name in PLACEHOLDERS or "/" in name or FOREIGN_FILES.intersection(name.split(".")[1:]):
        return True
    return sources().has(name) or is_elsewhere(name)


def test_what_docstrings_name_exists() -> None:
    missing = {
        (str(path.relative_to(PACKAGE)), name)
        for path, text in sources().docstrings()
        for name in NAME.findall(text)
        if not resolves(name)
    }
    assert missing == set()


def test_what_docstrings_refer_to_exists() -> None:
    missing = set()
    for path, text in sources().docstrings():
        bodies = [node.body for node in ast.walk(sources().trees[path]) if isinstance(node, (ast.Module, ast.ClassDef))]
        here = set().union(*map(defined_in, bodies))
        for name in ROLE.findall(text):
            if not (name in here or resolves(name)):
                missing.add((str(path.relative_to(PACKAGE)), name))
    assert missing == set()


@pytest.mark.parametrize(
    "name",
    [
        "transition.py",
        "membership/transition.py",
        "driver/membership/transition.py",
        "docs/edlrun.md",
        "torch/_compile.py",
        "history.replay",
        "membership.history.replay",
        "edl_hvd.driver.membership.transition",
        "Membership.wanted",
        "JobView.dead",
        "record.asked_s",
        "edl_hvd.State",
        "torch.autograd.grad",
        "optimizer.step",
    ],
)
def test_the_rule_knows_what_exists(name: str) -> None:
    assert resolves(name)


@pytest.mark.parametrize(
    "name",
    [
        "membership.py",
        "driver/transition.py",
        "docs/nothing.md",
        "torch/nothing.py",
        "processes.Launcher",
        "membership.replay",
        "history.nothing",
        "Membership.nothing",
        "nothing.anything",
        "edl_hvd.nothing",
        "torch.nothing",
        "optimizer.nothing",
    ],
)
def test_the_rule_sees_what_does_not_exist(name: str) -> None:
    assert not resolves(name)
