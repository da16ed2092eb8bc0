"""What type checkers and editors see of the installed package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from documents import REPOSITORY

import edl_hvd

# Expression to its type, as mypy prints it.
REVEALED = {
    "edl_hvd.State(model=model, steps=0)": "edl_hvd.worker.state.State",
    "edl_hvd.DistributedOptimizer(sgd, model.named_parameters())": "torch.optim.sgd.SGD",
    "edl_hvd.DistributedOptimizer": "-> _Optimizer",
    'edl_hvd.allreduce(torch.ones(1), op="mean")': "torch._tensor.Tensor",
    "edl_hvd.allgather(torch.ones(1))": "torch._tensor.Tensor",
    "edl_hvd.broadcast(torch.ones(1), root_rank=0)": "torch._tensor.Tensor",
    "edl_hvd.rank()": "int",
    "edl_hvd.device()": "torch._C.device",
    "edl_hvd.ElasticBatchSampler(10, global_batch=4)": "edl_hvd.data.sampler.ElasticBatchSampler",
    "edl_hvd.metrics.Mean()": "edl_hvd.metrics.",
    "edl_hvd.errors.UsageError()": "edl_hvd.errors.UsageError",
    "bare": "def (state: edl_hvd.worker.state.State, epochs: int =) -> str",
    "bare(state)": "str",
    "with_arguments": "def (state: edl_hvd.worker.state.State)",
}
SCRIPT = """\
import torch

import edl_hvd

model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
state = edl_hvd.State(model=model)


@edl_hvd.elastic
def bare(state: edl_hvd.State, epochs: int = 3) -> str:
    return "done"


@edl_hvd.elastic(checkpoint="s3://bucket/run", keep_newest=2)
def with_arguments(state: edl_hvd.State) -> None:
    edl_hvd.barrier()


{reveals}
edl_hvd.broadcast_parameters(model.state_dict(), root_rank=0)
edl_hvd.allreduce(torch.ones(1), op="product")
bare("state")
"""


def test_type_checkers_are_told_the_names_of_the_table():
    tree = ast.parse((REPOSITORY / "edl_hvd" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    told = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            assert name.asname == name.name, "only 'as' makes it public for a type checker"
            told[name.name] = f"edl_hvd.{name.name}" if node.module == "edl_hvd" else node.module
    assert told == edl_hvd._HOMES


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the package is installed as from a wheel."""
    folder = tmp_path_factory.mktemp("types")
    source = folder / "source"
    shutil.copytree(REPOSITORY / "edl_hvd", source / "edl_hvd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    target = folder / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
               "--target", str(target), str(source)]  # fmt: skip
    subprocess.run(command, check=True)
    assert (target / "edl_hvd" / "py.typed").exists()
    return target


def test_a_script_of_a_user_sees_real_types(installed, tmp_path):
    script = SCRIPT.format(reveals="\n".join(f"reveal_type({expression})" for expression in REVEALED))
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file", os.devnull, "script.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    # Some versions of mypy say builtins.int for int.
    revealed = re.findall(r'note: Revealed type is "(.*)"', done.stdout.replace("builtins.", ""))
    assert len(revealed) == len(REVEALED), done.stdout
    for expression, seen in zip(REVEALED, revealed, strict=True):
        assert REVEALED[expression] in seen, f"{expression}: {seen}"
        assert "Any" not in seen, f"{expression}: {seen}"
    errors = re.findall(r"error: (.*?)  \[([\w-]+)\]", done.stdout)
    assert [code for _, code in errors] == ["attr-defined", "arg-type", "arg-type"], done.stdout
