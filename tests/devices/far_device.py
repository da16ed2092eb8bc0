"""Torch's device ``far``: a stand-in for a GPU whose memory the host cannot read. See ``far_device.cpp``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


class _Module:
    """What torch looks for at ``torch.far``."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers come from the CPU's generator."""


def build(folder: Path) -> Path:
    """Compile it; the library, in ``folder``. Takes ten seconds."""
    from torch.utils import cpp_extension

    library = folder / "far_device.so"
    headers = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-fPIC", "-shared", *headers, str(SOURCE), *libraries]
    subprocess.run([*command, "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
    return library


def use(library: Path) -> None:
    """Give torch the device, for the rest of this process."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("far")
    torch._register_device_module("far", _Module)
    torch.utils.generate_methods_for_privateuse1_backend()


def allocated_bytes() -> int:
    """Of all tensors on it."""
    return int(torch.ops.far_device.allocated_bytes())
