"""The Horovod that is installed, and what its build relies on in the torch that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edl_hvd.build.plan import cxx_standard
from edl_hvd.build.torch_facts import ask_torch
from edl_hvd.build.verify import ask_horovod, run_allreduce
from edl_hvd.errors import BuildError
from edl_hvd.settings import cache_folder

torch = pytest.importorskip("torch")
REPOSITORY = Path(__file__).parents[2]


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


def command(python: Path | str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``edl-hvd`` prints, run by this interpreter."""
    program = "import sys; from edl_hvd.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run([str(python), "-c", program, *words], env=environment, capture_output=True, text=True)


def test_a_wheel_is_installed_by_a_host_of_the_same_kind_without_a_compiler(tmp_path: Path) -> None:
    """Made of the store of ``make setup`` where it is there, else compiled, which takes minutes."""
    wheels = tmp_path / "wheels"
    store = cache_folder({name: value for name, value in os.environ.items() if name != "EDL_HVD_CACHE"})
    made = command(sys.executable, "build-horovod", "--wheel", str(wheels), EDL_HVD_CACHE=str(store))
    assert made.returncode == 0, made.stdout + made.stderr
    [wheel] = wheels.glob("*.whl")
    assert str(wheel) in made.stdout.replace("\n", "")
    assert json.loads(wheel.with_suffix(".json").read_text())["torch"]["version"] == torch.__version__
    with zipfile.ZipFile(wheel) as archive:
        assert any(re.fullmatch(r"horovod/torch/mpi_lib_v2.*\.so", name) for name in archive.namelist())

    host = tmp_path / "host"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(host)], check=True)
    python = host / "bin" / "python"
    [site] = host.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    (tmp_path / "programs").mkdir()
    for name in ("sh", "bash", "env", "uname", "hostname"):
        if found := shutil.which(name):
            (tmp_path / "programs" / name).symlink_to(found)
    path = os.pathsep.join([str(python.parent), str(tmp_path / "programs")])
    assert not any(shutil.which(compiler, path=path) for compiler in ("c++", "g++", "gcc", "cc", "clang++", "make"))
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    done = subprocess.run(install, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    where = subprocess.run([python, "-c", "import horovod; print(horovod.__file__)"], capture_output=True, text=True)
    assert Path(where.stdout.strip()).is_relative_to(host), where.stdout + where.stderr
    checked = command(python, "build-horovod", "--check-only", PATH=path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "allreduce over gloo" in checked.stdout
