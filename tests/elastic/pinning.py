"""Loaders that hand batches on through their pinning thread, also on a machine without an accelerator.

What the thread does to a batch, a copy into pinned memory, is torch's own; here it is an ordinary copy. What matters is
the thread: it takes batches from the loader's processes, further ahead than anybody has asked for.
"""

from __future__ import annotations

import torch


class Pinned:
    """Counts the tensors that came through."""

    def __init__(self) -> None:
        self.count = 0

    def pretend(self) -> None:
        """From now on loaders with ``pin_memory=True`` pin."""
        if torch.accelerator.is_available():
            copy = torch.Tensor.pin_memory
        else:
            copy = torch.Tensor.clone
            torch.accelerator.is_available = lambda: True
            torch.accelerator.current_accelerator = lambda: torch.device("cpu")
            torch.accelerator.current_device_index = lambda: 0
            torch.accelerator.set_device_index = lambda index: None

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return copy(tensor)

        torch.Tensor.pin_memory = pin
