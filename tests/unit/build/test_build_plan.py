from __future__ import annotations

from pathlib import Path

import pytest

from edl_hvd.build.cuda import CudaToolkit, Nccl
from edl_hvd.build.plan import (
    BuildOptions,
    GpuChoice,
    choose_gpu,
    choose_jobs,
    choose_mpi,
    cxx_standard,
    make_plan,
    read_options,
)
from edl_hvd.build.tools import Tool
from edl_hvd.build.torch_facts import TorchFacts
from edl_hvd.errors import BuildError, UsageError

CPU = TorchFacts("2.13.0+cpu")
CUDA_12 = TorchFacts("2.5.1+cu121", cuda="12.1")
CUDA_13 = TorchFacts("2.13.0+cu130", cuda="13.0")
CUDA_13_GPU = TorchFacts("2.13.0+cu130", cuda="13.0", gpus=("90", "90"))
CUDA_12_GPU = TorchFacts("2.5.1+cu121", cuda="12.1", gpus=("80",))
TOOLKIT_12 = CudaToolkit(Path("/usr/local/cuda-12.4"), "12.4")
TOOLKIT_13 = CudaToolkit(Path("/usr/local/cuda-13.0"), "13.0")
NCCL = Nccl(Path("/nccl/include"), Path("/nccl/lib/libnccl.so.2"), "2.29.7")
MPICXX = Tool("/usr/bin/mpicxx", "g++ 12.2.0")


@pytest.mark.parametrize(
    ("version", "standard"),
    [
        ("2.1.0", 17),
        ("2.1.2+cu121", 17),
        ("2.11.0", 17),
        ("2.12.0", 20),
        ("2.13.0+cpu", 20),
        ("2.14.0a0+git0123abc", 20),
        ("3.0.0", 20),
    ],
)
def test_the_standard_follows_the_torch_version(version: str, standard: int) -> None:
    assert cxx_standard(TorchFacts(version)) == standard


@pytest.mark.parametrize("version", ["2.0.1", "1.13.1"])
def test_a_torch_too_old_is_refused_with_the_way_out(version: str) -> None:
    with pytest.raises(BuildError, match=r"2\.1 or newer.*pip install --upgrade torch"):
        cxx_standard(TorchFacts(version))


@pytest.mark.parametrize(
    ("torch", "toolkits", "nccl", "why"),
    [
        (CPU, [], None, "without CUDA"),
        (CPU, [TOOLKIT_13], NCCL, "without CUDA"),
        (CUDA_13, [], NCCL, "no GPU"),
        (CUDA_13, [TOOLKIT_13], NCCL, "no GPU"),
        (CUDA_12_GPU, [], NCCL, "no CUDA 12 compiler"),
        (CUDA_12_GPU, [TOOLKIT_13], NCCL, "no CUDA 12 compiler"),
        (CUDA_13_GPU, [TOOLKIT_13], None, "NCCL is missing"),
    ],
)
def test_without_a_usable_gpu_horovod_is_built_for_the_cpu(
    torch: TorchFacts, toolkits: list[CudaToolkit], nccl: Nccl | None, why: str
) -> None:
    choice = choose_gpu(None, torch, toolkits, nccl)
    assert not choice.nccl
    assert why in choice.reason


@pytest.mark.parametrize("wish", [None, True])
def test_with_a_gpu_nccl_is_built_with_the_toolkit_of_torchs_own_cuda(wish: bool | None) -> None:
    choice = choose_gpu(wish, CUDA_13_GPU, [TOOLKIT_12, TOOLKIT_13], NCCL)
    assert (choice.nccl, choice.toolkit, choice.library, choice.packages) == (True, TOOLKIT_13, NCCL, ())


def test_without_a_toolkit_the_compiler_comes_from_the_package_index_since_cuda_13() -> None:
    choice = choose_gpu(None, CUDA_13_GPU, [TOOLKIT_12], NCCL)
    assert (choice.nccl, choice.packages) == (True, ("cuda-toolkit[nvcc,cccl]==13.0.*",))


def test_a_compiler_that_could_not_be_installed_leaves_horovod_to_the_cpu_unless_asked_for() -> None:
    choice = choose_gpu(None, CUDA_13_GPU, [], NCCL, can_install=False)
    assert not choice.nccl
    assert "install CUDA toolkit 13.0" in choice.reason
    with pytest.raises(BuildError, match=r"install CUDA toolkit 13\.0"):
        choose_gpu(True, CUDA_13_GPU, [], NCCL, can_install=False)


def test_nccl_can_be_asked_for_where_no_gpu_is() -> None:
    assert choose_gpu(True, CUDA_12, [TOOLKIT_12], NCCL).nccl


@pytest.mark.parametrize(
    ("torch", "toolkits", "nccl", "why"),
    [
        (CPU, [TOOLKIT_13], NCCL, "without CUDA"),
        (CUDA_12, [TOOLKIT_13], NCCL, r"no CUDA 12 compiler \(toolkits found: 13.0\)"),
        (CUDA_13, [TOOLKIT_13], None, "nvidia-nccl-cu13"),
        (TorchFacts("2.13.0+rocm7", rocm="7.0"), [], None, "HOROVOD_GPU_OPERATIONS"),
    ],
)
def test_nccl_asked_for_and_impossible_is_an_error_not_a_cpu_build(
    torch: TorchFacts, toolkits: list[CudaToolkit], nccl: Nccl | None, why: str
) -> None:
    with pytest.raises(BuildError, match=why):
        choose_gpu(True, torch, toolkits, nccl)


def test_without_nccl_wins_over_any_gpu() -> None:
    assert not choose_gpu(False, CUDA_13_GPU, [TOOLKIT_13], NCCL).nccl


def test_gpu_variables_of_the_user_are_left_alone() -> None:
    environ = {"HOROVOD_GPU_OPERATIONS": "MPI", "HOROVOD_GPU": "ROCM"}
    wishes = read_options(BuildOptions(), environ)
    choice = choose_gpu(wishes.nccl, TorchFacts("2.13.0+rocm7", rocm="7.0"), [], None, environ)
    plan = make_plan(CUDA_13, choice, None, 1, environ)
    assert choice.own_hands
    assert plan.environment["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert plan.environment["EDL_HVD_CPU_ONLY"] == "0"
    assert "HOROVOD_NCCL_LINK" not in plan.environment


def test_mpi_is_built_when_its_compiler_is_there_and_not_refused() -> None:
    assert choose_mpi(None, MPICXX) == MPICXX
    assert choose_mpi(None, None) is None
    assert choose_mpi(False, MPICXX) is None
    with pytest.raises(BuildError, match="mpicxx is not on the PATH"):
        choose_mpi(True, None)


@pytest.mark.parametrize(
    ("processors", "memory_gib", "jobs"), [(2, 24, 2), (16, 8, 4), (4, 1, 1), (1, 64, 1), (64, 256, 64)]
)
def test_jobs_stay_within_processors_and_memory(processors: int, memory_gib: int, jobs: int) -> None:
    assert choose_jobs(None, processors, memory_gib * 2**30) == jobs


def test_jobs_asked_for_are_taken_as_they_are() -> None:
    assert choose_jobs(7, 2, 2**30) == 7


def test_horovods_own_variables_are_wishes_too() -> None:
    assert read_options(BuildOptions(), {"HOROVOD_WITH_MPI": "1"}).mpi is True
    assert read_options(BuildOptions(), {"HOROVOD_WITHOUT_MPI": "1"}).mpi is False
    assert read_options(BuildOptions(), {"HOROVOD_GPU_OPERATIONS": "NCCL"}).nccl is True
    assert read_options(BuildOptions(), {}) == BuildOptions()


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (BuildOptions(mpi=False), {"HOROVOD_WITH_MPI": "1"}),
        (BuildOptions(mpi=True), {"HOROVOD_WITHOUT_MPI": "1"}),
        (BuildOptions(nccl=False), {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        (BuildOptions(), {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MPI": "1"}),
    ],
)
def test_contradicting_wishes_are_refused_by_name(flags: BuildOptions, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError) as refusal:
        read_options(flags, environ)
    assert all(name in str(refusal.value) for name in environ)


def test_a_cpu_build_keeps_cuda_out_and_says_so_to_cmake() -> None:
    environment = make_plan(CUDA_13, GpuChoice(False, "no GPU"), None, 2, {}).environment
    assert environment["EDL_HVD_CPU_ONLY"] == "1"
    assert environment["EDL_HVD_CXX_STANDARD"] == "20"
    assert environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert environment["MAKEFLAGS"] == "-j2"
    assert not any(name.startswith("HOROVOD_GPU") for name in environment)


def test_a_gpu_build_is_for_the_gpus_in_sight() -> None:
    torch = TorchFacts("2.13.0+cu130", cuda="13.0", gpus=("100", "90", "90"))
    environment = make_plan(torch, choose_gpu(None, torch, [TOOLKIT_13], NCCL), MPICXX, 2, {}).environment
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "90,100"
    assert environment["HOROVOD_WITH_MPI"] == "1"


def test_a_variable_the_user_set_beats_the_plan() -> None:
    plan = make_plan(CPU, GpuChoice(False, ""), None, 2, {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx2", "PATH": "/bin"})
    assert plan.environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx2"
    assert "PATH" not in plan.environment
