"""Random numbers that depend on what is computed, never on who computes it."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_of(*key: int) -> int:
    """A 63-bit seed from a few integers, e.g. (seed, epoch, sample index); equal on every machine.

    Neighbouring keys give unrelated seeds, unlike sums of them.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*key: int) -> None:
    """Seed torch (all devices), ``random`` and, if it is loaded, NumPy from a key.

    Called before each micro-batch, so that dropout does not depend on the rank that runs it.
    """
    seed = seed_of(*key)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
