"""What a host can compute: its devices, how fast a matrix product is on each, and whether it is right."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edl_hvd.gpus import count_gpus, hides_gpus
from edl_hvd.preflight.measured import Measured

if TYPE_CHECKING:
    import torch

_SIDE = {"cpu": 1024, "cuda": 4096}
# Of the square matrices: 20 to 100 ms on a few cores, 2 to 20 ms on a GPU; large enough to be limited by arithmetic.
_LEAST_S, _LEAST_TIMES, _MOST_TIMES = 0.3, 4, 50


def measure(environ: Mapping[str, str], nodes: Path = Path("/dev")) -> Measured:
    """Look at this host's devices. Takes about a second, and torch's import before it.

    The factors of the product hold small integers, so that it is exact in float32, TF32 included, and can be checked.

    Args:
        environ: Who hides the GPUs (``CUDA_VISIBLE_DEVICES``) wants to train without.
        nodes: Where the system shows its devices.
    """
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = count_gpus(nodes)
    if there and not seen and not hides_gpus(environ):
        return Measured(
            "cuda", 0, 0.0,
            f"its system has {there} GPU{'s' * (there > 1)}, torch {torch.__version__} sees none; see nvidia-smi and "
            "torch.cuda.is_available() there, or set CUDA_VISIBLE_DEVICES= to train without",
        )  # fmt: skip
    device = "cuda" if seen else "cpu"
    names = [f"cuda:{number}" for number in range(seen)] or ["cpu"]
    speeds = []
    for name in names:
        try:
            speeds.append(_multiply(torch.device(name)))
        except (RuntimeError, ArithmeticError) as error:  # a GPU that is broken, taken or full
            reason = str(error).splitlines()[0]
            return Measured(device, len(names), 0.0, f"a matrix product on its device {name} failed: {reason}")
    return Measured(device, len(names), min(speeds))


def _multiply(device: torch.device) -> float:
    """10^9 operations per second of the fastest of some products: what disturbs it is not the host's fault.

    Raises:
        ArithmeticError: The product is wrong.
        RuntimeError: The device fails.
    """
    import torch

    side = _SIDE[device.type]
    generator = torch.Generator().manual_seed(side)

    left, right = (torch.randint(-4, 5, (side, side), generator=generator).float().to(device) for _ in range(2))
    begun_s, fastest_s, times = time.perf_counter(), float("inf"), 0
    while times < _LEAST_TIMES or (times < _MOST_TIMES and time.perf_counter() - begun_s < _LEAST_S):
        times += 1
        start_s = time.perf_counter()
        product = left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    if wrong := wrong_rows(left, right, product):
        raise ArithmeticError(f"{wrong} of {side} rows are wrong")
    return 2 * side**3 / fastest_s / 1e9


def wrong_rows(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> int:
    """How many rows of a product of square matrices of small integers are not what they should be.

    By Freivalds' method (1977): (A B) v = A (B v), at the cost of three products with a vector. None of its numbers is
    zero, so that a single wrong number always shows; several in one row could cancel out.
    """
    import torch

    generator = torch.Generator().manual_seed(len(product))
    vector = torch.randint(1, 5, (len(product), 1), generator=generator).double().to(product.device)
    expected = left.double() @ (right.double() @ vector)
    return int((product.double() @ vector != expected).sum())
