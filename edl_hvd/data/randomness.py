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
    # Not torch.manual_seed: for each kind of device that is not in use it keeps the stack of its caller, for ever.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    _seed_host(seed)


def seed_loading(*key: int) -> None:
    """The same without the GPUs' generators: a loader's process must not touch a GPU, and loading needs none."""
    seed = seed_of(*key)
    torch.default_generator.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
