"""What decides, beside the program and its data, which bits a computation yields."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker import process


def arithmetic() -> dict[str, str]:
    """The properties of this process that decide how it rounds; processes that differ in one may round differently."""
    device = process.device()
    is_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads (torch.get_num_threads)": str(torch.get_num_threads()),
        "precision of matrix products (torch.get_float32_matmul_precision)": torch.get_float32_matmul_precision(),
    }


def refuse_other_arithmetic(of_first: Mapping[str, str]) -> None:
    """Stop a worker whose results may differ from those of rank 0 in their last bits.

    Raises:
        UsageError: It computes with something else.
    """
    own = arithmetic()
    others = [f"{name}: {own[name]!r} instead of {of_first[name]!r}" for name in own if own[name] != of_first[name]]
    if others:
        raise UsageError(
            f"exact=True needs workers that compute alike, and this one differs from rank 0 in {'; '.join(others)}; "
            "give all hosts the same hardware and settings (OMP_NUM_THREADS sets the threads), or leave exact=True out"
        )
