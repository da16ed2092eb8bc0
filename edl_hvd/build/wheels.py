"""Built wheels, kept under a key of everything that went into them, and used again on an exact match only.

pip keys its own cache by name and version, so it would install a Horovod compiled against another torch;
such a wheel imports with undefined symbols at best.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from edl_hvd.build.edits.mends import MENDS
from edl_hvd.build.edits.release import RELEASE
from edl_hvd.build.plan import BuildPlan
from edl_hvd.build.tools import Tool
from edl_hvd.build.torch_facts import TorchFacts

CMAKE_FOLDER = Path(__file__).parent / "cmake"

_COMPILER_VARIABLES = ("CXX", "CC", "CXXFLAGS", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX")


def wheel_facts(
    torch: TorchFacts, plan: BuildPlan, compiler: Tool, features: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, object]:
    """Everything a wheel depends on, in a form that can be written down and compared.

    What only steers the build (how many jobs, where scratch files lie) is left out.
    """
    gpu = plan.gpu
    return {
        "horovod": RELEASE,
        "mends": _digest(repr(MENDS).encode()),
        "torch": asdict(torch) | {"gpus": []},
        "python": sysconfig.get_config_var("SOABI") or sys.version,
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "processor": list(features),
        "compiler": [compiler.path, compiler.version],
        "mpi": [plan.mpi.path, plan.mpi.version] if plan.mpi else None,
        "cuda": gpu.toolkit.version if gpu.toolkit else None,
        "nccl": gpu.library.version if gpu.library else None,
        "flags": {name: environ[name] for name in _COMPILER_VARIABLES if environ.get(name)},
        "options": {name: value for name, value in sorted(plan.environment.items()) if name != "MAKEFLAGS"},
        "recipe": _digest(b"".join(path.read_bytes() for path in sorted(CMAKE_FOLDER.rglob("*.cmake")))),
    }


def wheel_key(facts: Mapping[str, object]) -> str:
    """A short name for ``facts``; any difference gives another."""
    return _digest(json.dumps(facts, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


class WheelStore:
    """A folder with one folder per key: the wheel and, for people, the facts it was built from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Path | None:
        """The wheel built from exactly these facts, or ``None``."""
        return next(iter(sorted((self._folder / key).glob("horovod-*.whl"))), None)

    def put(self, key: str, wheel: Path, facts: Mapping[str, object]) -> Path:
        """Keep a copy of ``wheel``. It appears under its key whole or not at all, whoever else writes it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        incoming = self._folder / f".{key}.{_digest(str(wheel).encode())}"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        shutil.copy2(wheel, incoming / wheel.name)
        (incoming / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
        try:
            incoming.rename(self._folder / key)
        except OSError:
            # Another process was faster, or an older wheel of this key is being replaced.
            replaced = incoming.with_name(incoming.name + ".old")
            (self._folder / key).rename(replaced)
            incoming.rename(self._folder / key)
            shutil.rmtree(replaced, ignore_errors=True)
        return self._folder / key / wheel.name
