"""The Horovod that is installed, and what its build relies on in the torch that is installed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from edl_hvd.build.plan import cxx_standard
from edl_hvd.build.torch_facts import ask_torch
from edl_hvd.build.verify import ask_horovod, run_allreduce
from edl_hvd.errors import BuildError

torch = pytest.importorskip("torch")


def test_the_table_of_standards_agrees_with_the_installed_torch() -> None:
    config = Path(torch.__file__).parent / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    declared = re.search(r"CXX_STANDARD (\d+)", config.read_text())
    assert declared is not None
    assert cxx_standard(ask_torch(dict(os.environ))) == int(declared[1])


def test_the_installed_horovod_has_gloo() -> None:
    assert ask_horovod(dict(os.environ)).gloo


def test_inside_a_job_the_proof_is_a_job_of_its_own() -> None:
    world = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.1"}
    assert run_allreduce({**os.environ, **world}, "gloo") > 0


def test_a_horovod_that_does_not_load_is_one_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c106detail')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(BuildError, match=r"undefined symbol.*edl-hvd build-horovod"):
        ask_horovod(environment)


def test_an_allreduce_that_does_not_happen_is_an_error(tmp_path: Path) -> None:
    # A launcher that ends well without running anything.
    for package in ("horovod", "horovod/runner"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "horovod" / "runner" / "launch.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(BuildError, match="0 of them with the right sum, exit code 0"):
        run_allreduce({**os.environ, "PYTHONPATH": str(tmp_path)}, "gloo")
