"""Python, torch, torchvision and Horovod. Each import runs in a process of its own: it may crash."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping

from edl_hvd.build.edits.release import REVISION
from edl_hvd.build.plan import cxx_standard
from edl_hvd.build.torch_facts import TorchFacts, ask_torch
from edl_hvd.build.verify import HorovodFacts, ask_horovod
from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult
from edl_hvd.errors import BuildError

_GROUP = "Engine"
_IMPORT_TORCHVISION = """
from edl_hvd.compat.torchvision_operators import define_missing_operators
defined = define_missing_operators()
import torchvision
print(torchvision.__version__ + (" (without its own operators: their library does not load here)" if defined else ""))
"""
_REBUILD = "edl-hvd build-horovod"


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> CheckResult:
    text = ".".join(map(str, version))
    if version >= (3, 10):
        return CheckResult(_GROUP, "Python", OK, f"{text} ({platform.machine()})")
    return CheckResult(_GROUP, "Python", MISSING, text, "install Python 3.10 or newer")


def check_engine(environ: Mapping[str, str]) -> list[CheckResult]:
    """torch, torchvision and Horovod, in the order in which each needs the one before."""
    try:
        torch = ask_torch(environ)
    except BuildError as error:
        return [
            CheckResult(_GROUP, "torch", MISSING, _reason(error), "pip install 'edl-hvd[torch]'"),
            CheckResult(_GROUP, "Horovod", MISSING, "cannot be there without torch", _REBUILD),
        ]
    findings = [judge_torch(torch), check_torchvision(environ)]
    try:
        horovod = ask_horovod(environ)
    except BuildError as error:
        return [*findings, CheckResult(_GROUP, "Horovod", MISSING, _reason(error), _REBUILD)]
    return [*findings, *judge_horovod(horovod, torch)]


def judge_torch(torch: TorchFacts) -> CheckResult:
    try:
        cxx_standard(torch)
    except BuildError:
        return CheckResult(_GROUP, "torch", MISSING, f"{torch.version}, too old", "pip install --upgrade 'torch>=2.1'")
    kind = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "CPU build"
    gpus = len(torch.gpus)
    count = f", {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ", no GPU in sight" if torch.cuda else ""
    return CheckResult(_GROUP, "torch", OK, f"{torch.version} ({kind}{count})")


def check_torchvision(environ: Mapping[str, str]) -> CheckResult:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORT_TORCHVISION],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if answer.returncode == 0:
        return CheckResult(_GROUP, "torchvision", OK, answer.stdout.strip().splitlines()[-1])
    reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
    return CheckResult(
        _GROUP, "torchvision", ADVICE, reason, "pip install 'edl-hvd[torch]' (only the ImageNet example needs it)"
    )


def judge_horovod(horovod: HorovodFacts, torch: TorchFacts) -> list[CheckResult]:
    """What the installed Horovod can do, against what this machine has."""
    if horovod.gloo:
        gloo = CheckResult(_GROUP, "Gloo", OK, "built")
    else:
        gloo = CheckResult(_GROUP, "Gloo", MISSING, "not built; elastic jobs need it", _REBUILD)
    mpi = CheckResult(_GROUP, "MPI", OK, "built" if horovod.mpi else "not built; only mpirun jobs need it")
    if horovod.nccl:
        nccl = CheckResult(_GROUP, "NCCL", OK, "built")
    elif torch.gpus:
        fix = f"{_REBUILD} --with-nccl"
        nccl = CheckResult(_GROUP, "NCCL", ADVICE, "not built: gradients travel through host memory", fix)
    else:
        nccl = CheckResult(_GROUP, "NCCL", OK, "not built; there is no GPU to use it")
    if horovod.revision == REVISION:
        whole = CheckResult(
            _GROUP, "Horovod", OK, f"{horovod.version}, mended (revision {REVISION}), loads with this torch"
        )
    else:
        has = f"mended to revision {horovod.revision}" if horovod.revision else "not mended"
        whole = CheckResult(
            _GROUP, "Horovod", MISSING, f"{horovod.version}, {has}; revision {REVISION} is needed", _REBUILD
        )
    return [whole, gloo, mpi, nccl]


def _reason(error: BuildError) -> str:
    # "... cannot import it (reason); fix": the fix has a column of its own.
    text = str(error)
    return text[text.find("(") + 1 : text.find(");")] if "(" in text and ");" in text else text.splitlines()[0]
