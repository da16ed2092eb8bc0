"""One worker of the test that an installed Horovod works: ``python -m edl_hvd.worker.allreduce_check``.

Sums ``rank + 1`` over all ranks, on the GPU with ``--gpu``, and prints one line when the sum is right.
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

PASSED = "allreduce is right"


def main() -> None:
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if "--gpu" in sys.argv else torch.device("cpu")
    mine = torch.full((1000,), hvd.rank() + 1.0, device=device)
    total = hvd.allreduce(mine, op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    if not torch.equal(total, torch.full_like(mine, expected)):
        sys.exit(f"rank {hvd.rank()} of {hvd.size()}: expected {expected}, got {total[:3].tolist()}...")
    print(f"{PASSED}: rank {hvd.rank()} of {hvd.size()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
