"""Where CUDA and NCCL are: a system toolkit, or the packages that came with torch."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_HOMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_DEFAULT_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True)
class CudaToolkit:
    """A folder that can compile CUDA: compiler, runtime, all headers. ``version`` is e.g. "13.0"."""

    home: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class Nccl:
    """NCCL's header folder, library file and version, e.g. "2.29.7"."""

    include: Path
    library: Path
    version: str


def package_folder() -> Path:
    """Where NVIDIA's Python packages unpack themselves, whether or not any is installed."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


def find_toolkits(
    environ: Mapping[str, str], packages: Path | None = None, default_home: Path = _DEFAULT_HOME
) -> list[CudaToolkit]:
    """Every toolkit in sight, the one most likely meant first."""
    homes = [Path(environ[name]) for name in _HOMES if environ.get(name)]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
    homes += [default_home, *sorted((packages or package_folder()).glob("cu[0-9]*"), reverse=True)]
    found = [toolkit for home in homes if (toolkit := _toolkit_at(home)) is not None]
    return list(dict.fromkeys(found))


def _toolkit_at(home: Path) -> CudaToolkit | None:
    # cuda_runtime_api.h says `#define CUDART_VERSION  13000`: major * 1000 + minor * 10.
    version = _defined(home / "include" / "cuda_runtime_api.h", "CUDART_VERSION")
    # The Python packages bring compiler, runtime and the headers of libcu++ apart from each other.
    complete = (home / "bin" / "nvcc").is_file() and any((home / "include").glob("**/nv/target"))
    if version is None or not complete:
        return None
    return CudaToolkit(home.resolve(), f"{version // 1000}.{version % 1000 // 10}")


def find_nccl(environ: Mapping[str, str], toolkits: list[CudaToolkit], packages: Path | None = None) -> Nccl | None:
    """The NCCL to link: what the user names, else the one torch itself loads, else the system's.

    Two NCCL versions in one process do not mix, so torch's comes before the system's.
    """
    for include, folders in _nccl_places(environ, toolkits, packages or package_folder()):
        version = [_defined(include / "nccl.h", f"NCCL_{part}") for part in ("MAJOR", "MINOR", "PATCH")]
        libraries = [library for folder in folders for library in sorted(folder.glob("libnccl.so*"))]
        if None not in version and libraries:
            return Nccl(include, libraries[0], ".".join(map(str, version)))
    return None


def _nccl_places(
    environ: Mapping[str, str], toolkits: list[CudaToolkit], packages: Path
) -> Iterator[tuple[Path, list[Path]]]:
    if environ.get("HOROVOD_NCCL_INCLUDE") and environ.get("HOROVOD_NCCL_LIB"):
        yield Path(environ["HOROVOD_NCCL_INCLUDE"]), [Path(environ["HOROVOD_NCCL_LIB"])]
    homes = [Path(environ["HOROVOD_NCCL_HOME"])] if environ.get("HOROVOD_NCCL_HOME") else []
    homes += [packages / "nccl", *(toolkit.home for toolkit in toolkits)]
    for home in homes:
        yield home / "include", [home / "lib", home / "lib64"]
    yield Path("/usr/include"), [*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")]


def _defined(header: Path, name: str) -> int | None:
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^\s*#\s*define\s+{name}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def arrange(toolkit: CudaToolkit, nccl: Nccl, folder: Path) -> tuple[Path, Path]:
    """Lay toolkit and NCCL out the way CMake looks for them, with links only.

    The Python packages have ``lib`` where CMake expects ``lib64``, and ``libcudart.so.13`` without the
    ``libcudart.so`` that a linker opens.

    Args:
        folder: An empty folder to fill.

    Returns:
        The folder to give as ``HOROVOD_CUDA_HOME`` and the one to give as ``HOROVOD_NCCL_HOME``.
    """
    cuda_home, nccl_home = folder / "cuda", folder / "nccl"
    cuda_home.mkdir(parents=True)
    for entry in toolkit.home.iterdir():
        if entry.name not in ("lib", "lib64"):
            (cuda_home / entry.name).symlink_to(entry)
    library_folder = toolkit.home / ("lib64" if (toolkit.home / "lib64").is_dir() else "lib")
    _link_libraries(library_folder, cuda_home / "lib64")
    (cuda_home / "lib").symlink_to("lib64")

    nccl_home.mkdir()
    (nccl_home / "include").symlink_to(nccl.include)
    (nccl_home / "lib").mkdir()
    (nccl_home / "lib" / "libnccl.so").symlink_to(nccl.library)
    return cuda_home, nccl_home


def _link_libraries(source: Path, target: Path) -> None:
    target.mkdir()
    for library in source.iterdir():
        (target / library.name).symlink_to(library)
    for library in source.glob("lib*.so.*"):
        plain = target / (library.name.split(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library)
