"""Proof that the installed Horovod works: real processes that allreduce over the loopback interface."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.errors import BuildError

_TIMEOUT_S = 180.0
# Two imports of torch from a cold disk on a busy machine; the allreduce itself takes milliseconds.

# Inside a job these describe its world; the processes started here are a world of their own.
_WORLD = (
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME", "HOROVOD_ELASTIC"),
    *(
        "HOROVOD_GLOO_RENDEZVOUS_",
        "HOROVOD_GLOO_IFACE",
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "PMIX_",
    ),
)
_ASK = """
import ctypes, json, horovod, horovod.torch as hvd
from horovod.torch import mpi_lib_v2
library = ctypes.CDLL(mpi_lib_v2.__file__)
print(json.dumps({"version": horovod.__version__, "gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()),
                  "nccl": bool(hvd.nccl_built()), "cuda": bool(hvd.cuda_built()),
                  "revision": library.horovod_mended_revision() if hasattr(library, "horovod_mended_revision") else 0}))
"""


@dataclass(frozen=True)
class HorovodFacts:
    """An installed Horovod: its version, and what was compiled into it.

    ``revision``: Of the changes to the release, see ``edits/``; 0 for a build without.
    """

    version: str
    gloo: bool
    mpi: bool
    nccl: bool
    cuda: bool
    revision: int = 0


def ask_horovod(environ: Mapping[str, str], python: str = sys.executable) -> HorovodFacts:
    """The Horovod that ``python`` imports.

    Raises:
        BuildError: It is missing, or its import fails.
    """
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", _ASK],
            env=_outside_a_job(environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"importing horovod.torch did not end within {_TIMEOUT_S:.0f} s") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"horovod.torch cannot be imported ({reason}); run: edl-hvd build-horovod")
    return HorovodFacts(**json.loads(answer.stdout.strip().splitlines()[-1]))


def run_allreduce(environ: Mapping[str, str], controller: str, workers: int = 2, gpu: bool = False) -> float:
    """Start ``workers`` processes with ``horovodrun`` on this machine and let them allreduce.

    Args:
        controller: "gloo" or "mpi".
        gpu: Reduce on the GPU, one per worker.

    Returns:
        Seconds it took, process start included.

    Raises:
        BuildError: With what the processes said.
    """
    command = [
        *(sys.executable, "-W", "ignore", "-m", "horovod.runner.launch", f"--{controller}", "--disable-cache"),
        *("-np", str(workers), "-H", f"localhost:{workers}", "--network-interfaces", loopback_interface()),
        *(sys.executable, "-W", "ignore", "-m", "edl_hvd.worker.allreduce_check", *(["--gpu"] if gpu else [])),
    ]
    start_s = time.monotonic()
    try:
        answer = subprocess.run(
            command,
            env=_outside_a_job(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
        output, ending = answer.stdout, f"exit code {answer.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ending = str(error.stdout or ""), f"no end after {_TIMEOUT_S:.0f} s"
    # horovodrun has been seen to exit 0 without running anything; what counts is what the workers say.
    passed = sum(f"allreduce is right: rank {rank} of {workers}" in output for rank in range(workers))
    if ending != "exit code 0" or passed != workers:
        tail = "\n".join(f"  {line}" for line in output.strip().splitlines()[-15:])
        way_out = "; who needs no MPI builds with --without-mpi" if controller == "mpi" else ""
        raise BuildError(
            f"the installed Horovod does not work: {workers} processes over {controller} on this machine, "
            f"{passed} of them with the right sum, {ending}{way_out}:\n{tail}"
        )
    return time.monotonic() - start_s


def loopback_interface() -> str:
    """The name of this machine's loopback interface: "lo" on Linux, "lo0" elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def _outside_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(_WORLD)}
