"""The tools a build needs, and the memory and processors it may use. Looks, decides nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
# Module to import -> name on the package index. All of them belong to the extra `build-horovod`.
_MODULES = {
    "pip": "pip",
    "setuptools": "setuptools<81",
    "wheel": "wheel",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Tool:
    """A program: where it is, and the first line it says about its version."""

    path: str
    version: str


def find_tool(names: Sequence[str], environ: Mapping[str, str]) -> Tool | None:
    """The first of ``names`` that is on the ``PATH`` of ``environ`` and runs."""
    for name in names:
        path = shutil.which(name, path=environ.get("PATH"))
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], env=dict(environ), capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return Tool(path, (answer.stdout.strip().splitlines() or [""])[0])
    return None


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """The path of a program, without running it."""
    return shutil.which(name, path=environ.get("PATH"))


def find_compiler(environ: Mapping[str, str]) -> Tool | None:
    """The C++ compiler CMake will take: ``CXX`` if set, else the usual names."""
    chosen = environ.get("CXX", "").split()
    return find_tool(chosen[:1] or _COMPILERS, environ)


def find_cmake(environ: Mapping[str, str]) -> Tool | None:
    """The CMake that Horovod's setup will call: ``HOROVOD_CMAKE`` if set, else the one on the path."""
    return find_tool([environ.get("HOROVOD_CMAKE") or "cmake"], environ)


def missing_modules() -> list[str]:
    """Python packages the build needs and this interpreter lacks, by their name on the package index."""
    return [package for module, package in _MODULES.items() if importlib.util.find_spec(module) is None]


def python_header() -> Path:
    """Where ``Python.h`` of this interpreter belongs; many systems ship it apart from Python."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def with_own_programs_first(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the programs of this interpreter's environment (cmake, ...) ahead of the system's."""
    own = str(Path(sys.executable).parent)
    return {**environ, "PATH": os.pathsep.join([own, environ.get("PATH", os.defpath)])}


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory of this machine, or of the container when that is less."""
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            size_bytes = min(size_bytes, int(text))
    return size_bytes


def processor_features() -> tuple[str, ...]:
    """Which instruction sets Horovod will compile for: its build asks ``gcc -march=native`` for these."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return (platform.machine(),)
    return tuple(sorted(flags & {"f16c", "avx", "fma"}))
