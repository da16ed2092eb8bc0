"""What is changed in torch: that it can be left out, that it is documented, and that nothing else changes a library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edl_hvd
from edl_hvd.compat import patching
from edl_hvd.compat.patching import PATCHES, is_made
from edl_hvd.errors import SettingsError

PACKAGE = Path(edl_hvd.__file__).parent
# What torch documents for being set.
SETTINGS = {"torch.backends.cudnn.benchmark"}
DOCUMENT = PACKAGE.parent / "docs" / "patches.md"

# Prints the patches that were made.
PROGRAM = """
import sys, torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

def present():
    return {"schedulers": (LRScheduler.__init__, ReduceLROnPlateau.__init__), "backward": torch.autograd.backward,
            "averages": AveragedModel.update_parameters, "lazy_dynamo": sys.modules.get("torch._dynamo")}

before = present()
import edl_hvd
edl_hvd.State
edl_hvd.init()
after = present()
print(*sorted(name for name in before if before[name] is not after[name] and before[name] != after[name]))
"""


def made(without: str) -> list[str]:
    environment = {"EDL_HVD_WITHOUT_PATCHES": without, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("without", ["", "lazy_dynamo", "backward, schedulers", ",".join(PATCHES)])
def test_each_is_made_unless_it_is_left_out(without: str) -> None:
    assert made(without) == sorted(set(PATCHES) - set(re.split(r", ?", without)))


def test_a_name_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "left_out_patches", lambda: frozenset({"backward", "forward"}))
    with pytest.raises(SettingsError, match="names forward; expected names out of averages, backward, lazy_dynamo"):
        is_made("backward")


def test_the_document_lists_them_all() -> None:
    table = DOCUMENT.read_text().partition("\n## ")[0]
    assert tuple(sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))) == PATCHES


def foreign_changes(source: str) -> list[int]:
    """Lines that set an attribute of a name imported from another library, or a module's place in ``sys.modules``."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {*sys.stdlib_module_names, "edl_hvd", "__future__"}
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {
                (name.asname or name.name).split(".")[0] for name in node.names if name.name.split(".")[0] not in own
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in own:
            names |= {name.asname or name.name for name in node.names}
    lines = []
    for node in (node for node in nodes if isinstance(node, ast.Assign)):
        for target in node.targets:
            if ast.unparse(target) in SETTINGS:
                continue
            owner = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
            if isinstance(target, ast.Subscript) and owner is not None and ast.unparse(owner) == "sys.modules":
                lines.append(node.lineno)
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in names:
                lines.append(node.lineno)
    return lines


def test_nothing_but_compat_changes_another_library() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in foreign_changes(path.read_text())
        if path.parent.name != "compat"
    }
    assert found == set(), "do it with edl_hvd.compat.patching.replace, and list it in docs/patches.md"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch\ntorch.autograd.backward = f", [2]),
        ("from a.b import C\ndef f():\n    C._d = 1", [3]),
        ("import sys\nsys.modules['a'] = b", [2]),
        ("import os, edl_hvd.clock\nfrom edl_hvd import clock\nos.x = clock.y = 1", []),
        ("import torch\ntorch.backends.cudnn.benchmark = False", []),
        ("import torch\nx = torch.zeros(1)\nx.grad = None", []),
    ],
)
def test_the_rule_sees_changes_of_other_libraries(source: str, lines: list[int]) -> None:
    assert foreign_changes(source) == lines
