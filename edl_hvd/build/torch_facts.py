"""What the build must know of the installed torch, asked in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.errors import BuildError

# torch prints warnings on import now and then; the answer is the last line.
_QUESTION = """
import json, torch
gpus = []
if torch.version.cuda and torch.cuda.is_available():
    gpus = ["%d%d" % torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "rocm": torch.version.hip,
    "revision": torch.version.git_version,
    "cxx11_abi": torch.compiled_with_cxx11_abi(),
    "gpus": gpus,
}))
"""
_TIMEOUT_S = 300.0
# A first import from a cold network disk takes minutes; beyond this it hangs.


@dataclass(frozen=True)
class TorchFacts:
    """An installed torch.

    Attributes:
        version: As torch says it, e.g. "2.13.0+cu130".
        cuda: CUDA version it was built with, e.g. "13.0"; ``None`` for a build without CUDA.
        rocm: ROCm version it was built with, or ``None``.
        revision: The commit it was built from.
        cxx11_abi: Whether it was compiled with the C++11 ABI of libstdc++.
        gpus: Compute capability of every CUDA device torch can use now, e.g. ("90", "90").
    """

    version: str
    cuda: str | None = None
    rocm: str | None = None
    revision: str = ""
    cxx11_abi: bool = True
    gpus: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version: "2.13.0a0+git1" is (2, 13)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def ask_torch(environ: Mapping[str, str], python: str = sys.executable) -> TorchFacts:
    """The torch that ``python`` imports. Blocks for as long as that import takes, about a second.

    Raises:
        BuildError: torch is not installed, or its import fails.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"importing torch with {python} did not end within {_TIMEOUT_S:.0f} s") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"Horovod is built against torch, and {python} cannot import it ({reason}); "
            "install it first: pip install 'edl-hvd[torch]'"
        )
    facts = json.loads(answer.stdout.strip().splitlines()[-1])
    return TorchFacts(**{**facts, "gpus": tuple(facts["gpus"])})
