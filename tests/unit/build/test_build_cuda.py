from __future__ import annotations

from pathlib import Path

import pytest

from edl_hvd.build.cuda import arrange, find_nccl, find_toolkits

NOWHERE = Path("/nonexistent")


def make_toolkit(home: Path, version: int, library_folder: str = "lib64") -> Path:
    for folder in ("bin", "include", library_folder):
        (home / folder).mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (home / "bin" / "nvcc").chmod(0o755)
    (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    (home / "include" / "cccl" / "nv").mkdir(parents=True)
    (home / "include" / "cccl" / "nv" / "target").write_text("")
    (home / library_folder / "libcudart.so.13").write_text("runtime")
    return home


def make_nccl(home: Path) -> Path:
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n")
    (home / "lib" / "libnccl.so.2").write_text("nccl")
    return home


def test_a_toolkit_is_a_folder_with_nvcc_and_a_version(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "cuda", 12040)
    (found,) = find_toolkits({"CUDA_HOME": str(tmp_path / "cuda")}, NOWHERE, NOWHERE)
    assert (found.home, found.version, found.major) == (tmp_path / "cuda", "12.4", 12)


@pytest.mark.parametrize("part", ["bin/nvcc", "include/cuda_runtime_api.h", "include/cccl/nv/target"])
def test_a_folder_without_compiler_runtime_or_headers_is_no_toolkit(tmp_path: Path, part: str) -> None:
    (make_toolkit(tmp_path / "cuda", 13000) / part).unlink()
    assert find_toolkits({"CUDA_HOME": str(tmp_path / "cuda")}, NOWHERE, NOWHERE) == []


def test_what_the_user_names_comes_before_the_path_the_default_and_the_packages(tmp_path: Path) -> None:
    homes = [make_toolkit(tmp_path / name, 13000) for name in ("named", "on_path", "default")]
    packaged = make_toolkit(tmp_path / "packages" / "cu13", 13000, "lib")
    environ = {"CUDA_HOME": str(homes[0]), "PATH": str(homes[1] / "bin")}
    found = find_toolkits(environ, tmp_path / "packages", homes[2])
    assert [toolkit.home for toolkit in found] == [*homes, packaged]


def test_one_toolkit_seen_three_ways_counts_once(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda-13.0", 13000)
    (tmp_path / "cuda").symlink_to(home)
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(home / "bin")}
    assert len(find_toolkits(environ, NOWHERE, tmp_path / "cuda")) == 1


def test_the_nccl_of_torch_comes_before_the_toolkits(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    make_nccl(packages / "nccl")
    make_toolkit(tmp_path / "cuda", 13000)
    make_nccl_in_toolkit = tmp_path / "cuda" / "include" / "nccl.h"
    make_nccl_in_toolkit.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 1\n#define NCCL_PATCH 0\n")
    (tmp_path / "cuda" / "lib64" / "libnccl.so").write_text("")
    toolkits = find_toolkits({"CUDA_HOME": str(tmp_path / "cuda")}, packages, NOWHERE)
    nccl = find_nccl({}, toolkits, packages)
    assert nccl is not None
    assert nccl.version == "2.29.7"
    assert nccl.library == packages / "nccl" / "lib" / "libnccl.so.2"


def test_the_nccl_the_user_names_comes_first(tmp_path: Path) -> None:
    make_nccl(tmp_path / "packages" / "nccl")
    mine = make_nccl(tmp_path / "mine")
    nccl = find_nccl({"HOROVOD_NCCL_HOME": str(mine)}, [], tmp_path / "packages")
    assert nccl is not None
    assert nccl.include == mine / "include"


def test_a_header_without_a_library_is_no_nccl(tmp_path: Path) -> None:
    home = make_nccl(tmp_path / "nccl")
    (home / "lib" / "libnccl.so.2").unlink()
    found = find_nccl({"HOROVOD_NCCL_HOME": str(home)}, [], NOWHERE)
    assert found is None or not found.include.is_relative_to(tmp_path)


def test_packages_are_arranged_the_way_a_linker_looks_for_them(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    make_toolkit(packages / "cu13", 13000, "lib")
    make_nccl(packages / "nccl")
    (toolkit,) = find_toolkits({}, packages, NOWHERE)
    nccl = find_nccl({}, [toolkit], packages)
    assert nccl is not None
    cuda_home, nccl_home = arrange(toolkit, nccl, tmp_path / "links")
    assert (cuda_home / "bin" / "nvcc").is_file()
    assert (cuda_home / "lib64" / "libcudart.so").read_text() == "runtime"
    assert (cuda_home / "lib" / "libcudart.so.13").is_file()
    assert (nccl_home / "include" / "nccl.h").is_file()
    assert (nccl_home / "lib" / "libnccl.so").read_text() == "nccl"
