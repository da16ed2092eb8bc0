"""The whole of ``edl-hvd build-horovod``: look, decide, compile or reuse, install, prove."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from edl_hvd.build import compile as compilation
from edl_hvd.build import cuda, tools, verify
from edl_hvd.build.plan import BuildOptions, BuildPlan, choose_gpu, choose_jobs, choose_mpi, make_plan, read_options
from edl_hvd.build.torch_facts import TorchFacts, ask_torch
from edl_hvd.build.wheels import WheelStore, wheel_facts, wheel_key
from edl_hvd.errors import BuildError


class Observer(Protocol):
    """Who is told how far the build is; the command line draws it."""

    def decided(self, plan: BuildPlan) -> None:
        """What will be built, before it is."""

    def stage(self, name: str) -> None:
        """A stage begins: the one before is done."""

    def progress(self, percent: int) -> None:
        """The running stage is this far."""


@dataclass(frozen=True)
class Wheel:
    """A finished wheel of Horovod.

    Attributes:
        path: The wheel.
        facts: What it was built from, as JSON.
        reused: Whether it came from the store.
    """

    path: Path
    facts: Path
    reused: bool


@dataclass(frozen=True)
class Outcome:
    """A Horovod that was proved to work.

    Attributes:
        horovod: What is compiled into it.
        reused: The wheel came from the store.
        allreduce_s: Seconds each proof took, by name ("gloo", "mpi", "nccl").
    """

    horovod: verify.HorovodFacts
    reused: bool
    allreduce_s: Mapping[str, float]


def build_horovod(
    options: BuildOptions, environ: Mapping[str, str], cache: Path, use_cache: bool, observer: Observer
) -> Outcome:
    """Build and install Horovod into this interpreter's environment. Blocks for some minutes.

    Args:
        environ: The user's environment; its ``HOROVOD_*`` variables are kept.
        cache: Folder for finished wheels and logs.
        use_cache: Take a wheel from ``cache`` when one was built from exactly the same things.

    Raises:
        UsageError: Flags and variables contradict each other.
        BuildError: Something needed is missing, the build failed, or the result does not work.
    """
    environ = tools.with_own_programs_first(environ)
    wheel = _find_or_compile(options, environ, cache, use_cache, observer)
    observer.stage("Installing Horovod")
    compilation.install([str(wheel.path)], environ, "--no-deps", "--no-index", "--force-reinstall")
    return replace(prove(environ, observer), reused=wheel.reused)


def make_wheel(
    options: BuildOptions, environ: Mapping[str, str], cache: Path, use_cache: bool, observer: Observer, folder: Path
) -> Wheel:
    """Build Horovod and put its wheel into ``folder``; nothing is installed. Blocks for some minutes.

    A host of the same kind installs it without a compiler. Beside it lies what it was built from, as JSON: a host of
    another kind in one of these points needs another wheel.

    Raises:
        UsageError: Flags and variables contradict each other.
        BuildError: Something needed is missing, the build failed, or the wheel cannot be written.
    """
    wheel = _find_or_compile(options, tools.with_own_programs_first(environ), cache, use_cache, observer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / wheel.path.name
        facts = path.with_suffix(".json")
        shutil.copy2(wheel.facts, facts)
        shutil.copy2(wheel.path, path)
    except OSError as error:
        raise BuildError(f"the wheel cannot be put into {folder}: {error.strerror}; name another folder") from error
    return Wheel(path, facts, wheel.reused)


def _find_or_compile(
    options: BuildOptions, environ: Mapping[str, str], cache: Path, use_cache: bool, observer: Observer
) -> Wheel:
    """The wheel in the store, compiled now unless there is one that was built from exactly the same things."""
    options = read_options(options, environ)
    compiler = _require_tools(environ)
    observer.stage("Looking at torch")
    torch = ask_torch(environ)
    plan = _decide(options, torch, environ, observer)
    observer.decided(plan)

    facts = wheel_facts(torch, plan, compiler, tools.processor_features(), environ)
    key, store = wheel_key(facts), WheelStore(cache / "wheels")
    wheel = store.find(key) if use_cache else None
    reused = wheel is not None
    if wheel is None:
        observer.stage(f"Compiling Horovod{' with ccache' if tools.find_program('ccache', environ) else ''}")
        with tempfile.TemporaryDirectory(prefix="edl-hvd-") as folder:
            built = _compile(plan, environ, Path(folder), cache / "logs" / f"horovod-{key}.log", observer)
            wheel = store.put(key, built, facts)
    return Wheel(wheel, wheel.with_name("facts.json"), reused)


def prove(environ: Mapping[str, str], observer: Observer) -> Outcome:
    """Let processes allreduce over every transport the installed Horovod has.

    Raises:
        BuildError: Horovod is missing or does not work.
    """
    environ = tools.with_own_programs_first(environ)
    observer.stage("Looking at Horovod")
    horovod = verify.ask_horovod(environ)
    if not horovod.gloo:
        raise BuildError("the installed Horovod has no Gloo, which elastic jobs need; run: edl-hvd build-horovod")
    seconds: dict[str, float] = {}
    observer.stage("Two processes allreduce over Gloo")
    seconds["gloo"] = verify.run_allreduce(environ, "gloo")
    if horovod.mpi and tools.find_tool(["mpirun"], environ):
        observer.stage("Two processes allreduce over MPI")
        seconds["mpi"] = verify.run_allreduce(environ, "mpi")
    gpus = len(ask_torch(environ).gpus) if horovod.nccl else 0
    if gpus:
        workers = min(gpus, 2)
        observer.stage(f"{workers} process{'es' if workers > 1 else ''} allreduce over NCCL")
        seconds["nccl"] = verify.run_allreduce(environ, "gloo", workers, gpu=True)
    return Outcome(horovod, reused=True, allreduce_s=seconds)


def _require_tools(environ: Mapping[str, str]) -> tools.Tool:
    """The compiler; complains about everything that is missing at once."""
    compiler = tools.find_compiler(environ)
    problems = []
    if compiler is None:
        named = f"CXX={environ['CXX']!r} does not run; " if environ.get("CXX") else ""
        problems.append(f"a C++ compiler: {named}apt-get install g++, or set CXX")
    if tools.find_tool(["make", "gmake"], environ) is None:
        problems.append("make: apt-get install make")
    if not tools.python_header().is_file():
        problems.append(f"Python's headers ({tools.python_header()}): apt-get install python3-dev")
    packages = tools.missing_modules()
    if tools.find_cmake(environ) is None:
        packages.append("cmake<4")
    if packages:
        problems.append(f"Python packages {', '.join(packages)}: pip install 'edl-hvd[build-horovod]'")
    if compiler is None or problems:
        raise BuildError("building Horovod needs\n" + "\n".join(f"  {problem}" for problem in problems))
    return compiler


def _decide(options: BuildOptions, torch: TorchFacts, environ: Mapping[str, str], observer: Observer) -> BuildPlan:
    mpi = choose_mpi(options.mpi, tools.find_tool(["mpicxx"], environ))
    jobs = choose_jobs(options.jobs, tools.processors(), tools.memory_bytes())
    toolkits = cuda.find_toolkits(environ)
    gpu = choose_gpu(options.nccl, torch, toolkits, cuda.find_nccl(environ, toolkits), environ)
    if gpu.packages:
        observer.stage(f"Installing {', '.join(gpu.packages)}")
        try:
            compilation.install(list(gpu.packages), environ)
        except BuildError:
            if options.nccl:
                raise
        toolkits = cuda.find_toolkits(environ)
        # Asked again without the way out that was just taken.
        gpu = choose_gpu(options.nccl, torch, toolkits, gpu.library, environ, can_install=False)
    return make_plan(torch, gpu, mpi, jobs, environ)


def _compile(plan: BuildPlan, environ: Mapping[str, str], scratch: Path, log: Path, observer: Observer) -> Path:
    environment = {**environ, **plan.environment}
    for name in ("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHONPATH"):
        # Left by a `make` that called us; its job server is not Horovod's.
        environment.pop(name, None)
    if plan.gpu.toolkit and plan.gpu.library:
        cuda_home, nccl_home = cuda.arrange(plan.gpu.toolkit, plan.gpu.library, scratch / "links")
        environment |= {
            "HOROVOD_CUDA_HOME": str(cuda_home),
            "HOROVOD_NCCL_HOME": str(nccl_home),
            "CUDA_HOME": str(cuda_home),
            # nvcc of the chosen toolkit, whatever else is on the path: Horovod's setup calls it by name.
            "PATH": f"{cuda_home}/bin:{environment['PATH']}",
            # nvcc looks for its libraries beside its real place, where the Python packages have no lib64.
            "LIBRARY_PATH": os.pathsep.join(filter(None, [f"{cuda_home}/lib64", environment.get("LIBRARY_PATH")])),
        }
    return compilation.compile_wheel(environment, scratch, log, observer.progress)
