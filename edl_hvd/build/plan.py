"""What to build, decided from what was found and what the user wants. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edl_hvd.build.cuda import CudaToolkit, Nccl
from edl_hvd.build.tools import Tool
from edl_hvd.build.torch_facts import TorchFacts
from edl_hvd.errors import BuildError, UsageError

# From which torch on, which C++ standard: what TorchConfig.cmake inside the package asks for
# (read from 2.1, 2.5, 2.8, 2.9, 2.10, 2.11: 17; 2.12, 2.13: 20).
_STANDARDS = (((2, 12), 20), ((2, 1), 17))
_OLDEST_TORCH = _STANDARDS[-1][0]

_MEMORY_PER_JOB_BYTES = 2 * 2**30
# The largest file (torch's headers with the MPI operations) took 1.3 GB with GCC 12.

_GPU_REQUESTS = ("HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_ALLGATHER", "HOROVOD_GPU_BROADCAST")


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for; ``None`` leaves it to what is found.

    Attributes:
        nccl: GPU collectives.
        mpi: MPI as a second transport beside Gloo.
        jobs: Files compiled at a time.
    """

    nccl: bool | None = None
    mpi: bool | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class GpuChoice:
    """Whether to build GPU collectives, why, and from what.

    Attributes:
        reason: For people; says what to do when the choice is not the wanted one.
        packages: Python packages to install first because they hold the missing compiler.
        own_hands: The user's environment asks for a GPU build of its own making; it is left alone.
    """

    nccl: bool
    reason: str
    toolkit: CudaToolkit | None = None
    library: Nccl | None = None
    packages: tuple[str, ...] = ()
    own_hands: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """A decided build.

    Attributes:
        standard: C++ standard, 17 or 20.
        gpu, mpi, jobs: As chosen; ``mpi`` is the compiler wrapper or ``None``.
        environment: Variables for Horovod's build, less what depends on a scratch folder.
        remarks: For people: what was chosen about what, and why.
    """

    standard: int
    gpu: GpuChoice
    mpi: Tool | None
    jobs: int
    environment: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[tuple[str, str]] = ()


def cxx_standard(torch: TorchFacts) -> int:
    """The C++ standard that the headers of ``torch`` need.

    >>> cxx_standard(TorchFacts("2.11.0")), cxx_standard(TorchFacts("2.12.0+cu130"))
    (17, 20)

    Raises:
        BuildError: torch is older than 2.1.
    """
    for release, standard in _STANDARDS:
        if torch.release >= release:
            return standard
    raise BuildError(
        f"torch {torch.version} is installed; 2.1 or newer is supported "
        "(stock Horovod 0.28.1 builds against older ones by itself). Run: pip install --upgrade torch"
    )


def read_options(flags: BuildOptions, environ: Mapping[str, str]) -> BuildOptions:
    """Flags, completed from Horovod's own variables.

    Raises:
        UsageError: A flag says one thing and a variable the opposite.
    """
    asks_mpi = _tri(environ, "HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI")
    asks_gpu = True if any(environ.get(name) for name in _GPU_REQUESTS) else None
    for flag, variable, name in ((flags.mpi, asks_mpi, "mpi"), (flags.nccl, asks_gpu, "nccl")):
        if flag is not None and variable is not None and flag != variable:
            raise UsageError(
                f"--{'with' if flag else 'without'}-{name} contradicts a HOROVOD_* variable in the environment "
                f"({', '.join(sorted(key for key in environ if _concerns(key, name)))}); drop one of the two"
            )
    return BuildOptions(
        nccl=flags.nccl if flags.nccl is not None else asks_gpu,
        mpi=flags.mpi if flags.mpi is not None else asks_mpi,
        jobs=flags.jobs,
    )


def _tri(environ: Mapping[str, str], yes: str, no: str) -> bool | None:
    if environ.get(yes) == "1" and environ.get(no) == "1":
        raise UsageError(f"{yes}=1 and {no}=1 are both set; drop one of the two")
    return True if environ.get(yes) == "1" else False if environ.get(no) == "1" else None


def _concerns(variable: str, name: str) -> bool:
    return variable in _GPU_REQUESTS if name == "nccl" else variable in ("HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI")


def choose_gpu(
    wish: bool | None,
    torch: TorchFacts,
    toolkits: Sequence[CudaToolkit],
    nccl: Nccl | None,
    environ: Mapping[str, str] | None = None,
    can_install: bool = True,
) -> GpuChoice:
    """GPU collectives or not. Without a wish they need a GPU that torch can use now.

    Args:
        can_install: A missing compiler may be installed as a Python package.

    Raises:
        BuildError: They are asked for and cannot be built.
    """
    if wish is False:
        return GpuChoice(False, "not wanted")
    if environ and any(environ.get(name) for name in _GPU_REQUESTS):
        return GpuChoice(True, "as HOROVOD_GPU_* in the environment says", own_hands=True)
    if torch.cuda is None:
        build = f"a ROCm {torch.rocm} build; set HOROVOD_GPU_OPERATIONS" if torch.rocm else "a build without CUDA"
        return _without_gpu(wish, f"torch {torch.version} is {build}")
    if not torch.gpus and wish is None:
        return GpuChoice(False, "torch sees no GPU here; --with-nccl builds for the GPUs of other hosts")
    if nccl is None:
        return _without_gpu(wish, "NCCL is missing; run: pip install nvidia-nccl-cu" + torch.cuda.split(".")[0])
    major = int(torch.cuda.split(".")[0])
    toolkit = next((found for found in toolkits if found.major == major), None)
    reason = f"NCCL {nccl.version}, " + (
        f"for compute capability {', '.join(sorted(set(torch.gpus)))}" if torch.gpus else "as asked, no GPU is here"
    )
    if toolkit is not None:
        return GpuChoice(True, reason, toolkit, nccl)
    if major >= 13 and can_install:
        # Since CUDA 13 the package index carries the whole compiler; before, only parts of it.
        return GpuChoice(True, reason, None, nccl, packages=(f"cuda-toolkit[nvcc,cccl]=={torch.cuda}.*",))
    others = ", ".join(found.version for found in toolkits) or "none"
    return _without_gpu(wish, f"no CUDA {major} compiler (toolkits found: {others}); install CUDA toolkit {torch.cuda}")


def _without_gpu(wish: bool | None, problem: str) -> GpuChoice:
    if wish:
        raise BuildError(f"GPU collectives were asked for, but {problem}")
    return GpuChoice(False, problem)


def choose_mpi(wish: bool | None, mpicxx: Tool | None) -> Tool | None:
    """MPI when its compiler wrapper is there.

    Raises:
        BuildError: MPI is asked for and not there.
    """
    if wish and mpicxx is None:
        raise BuildError(
            "MPI was asked for, but mpicxx is not on the PATH; install an MPI, e.g. apt-get install libopenmpi-dev"
        )
    return None if wish is False else mpicxx


def choose_jobs(wish: int | None, processors: int, memory_bytes: int) -> int:
    """Files compiled at a time: one per processor as far as memory goes.

    >>> choose_jobs(None, processors=16, memory_bytes=8 * 2**30)
    4
    """
    return wish if wish is not None else max(1, min(processors, memory_bytes // _MEMORY_PER_JOB_BYTES))


def make_plan(torch: TorchFacts, gpu: GpuChoice, mpi: Tool | None, jobs: int, environ: Mapping[str, str]) -> BuildPlan:
    """All choices as variables for Horovod's build; a ``HOROVOD_*`` variable the user set is kept."""
    standard = cxx_standard(torch)
    environment = {
        "EDL_HVD_CXX_STANDARD": str(standard),
        "EDL_HVD_CPU_ONLY": "0" if gpu.nccl else "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "MAKEFLAGS": f"-j{jobs}",
        # Horovod's setup hands make's arguments to whatever CMake generates for.
        "CMAKE_GENERATOR": "Unix Makefiles",
    }
    if gpu.nccl and not gpu.own_hands:
        environment |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
        if torch.gpus:
            environment["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(sorted(set(torch.gpus), key=int))
    environment |= {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}
    remarks = (
        ("torch", f"{torch.version}, so C++{standard}"),
        ("GPU", f"{'yes' if gpu.nccl else 'no'}: {gpu.reason}"),
        ("MPI", f"yes: {mpi.path}" if mpi else "no; Gloo is always built"),
        ("jobs", f"{jobs} at a time"),
    )
    return BuildPlan(standard, gpu, mpi, jobs, environment, remarks)
