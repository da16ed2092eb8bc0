"""The GPUs of a host, and which of them its processes may see. Without torch, which a driver need not have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NODE = re.compile(r"nvidia\d+")


def count_gpus(nodes: Path = Path("/dev")) -> int:
    """Number of GPUs that this host's system shows, whether torch can use them or not."""
    return sum(_NODE.fullmatch(name) is not None for name in os.listdir(nodes))


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """Whether a process with this environment is to do without the GPUs that there are.

    >>> hides_gpus({VISIBLE_DEVICES: ""}), hides_gpus({VISIBLE_DEVICES: "3"}), hides_gpus({})
    (True, False, False)
    """
    return environ.get(VISIBLE_DEVICES, "0").strip() in ("", "-1")
