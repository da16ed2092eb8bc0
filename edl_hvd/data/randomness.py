"""Random numbers that depend on what is computed, never on who computes it."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

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


def seed_unseeded(seed: int) -> None:
    """Seed torch (all devices), ``random`` and NumPy, as far as the script has not done so itself.

    ``random`` keeps no mark of that, and counts as seeded where one of the others is. Called once, by ``init()``.

    Args:
        seed: Of the job, in [1, 2**32).
    """
    numpy = sys.modules.get("numpy")
    has_seeded_torch = _is_torch_seeded()
    has_seeded_numpy = numpy is not None and _is_numpy_seeded(numpy)
    if not has_seeded_torch:
        torch.manual_seed(seed)
    if numpy is not None and not has_seeded_numpy:
        numpy.random.seed(seed)
    if not has_seeded_torch and not has_seeded_numpy:
        random.seed(seed)


def _is_torch_seeded() -> bool:
    """Whether somebody has seeded torch; it begins with 64 bits from the system, other ones in each process.

    ``torch.manual_seed`` leaves a note for GPUs that are not in use yet. Where they are, a number of at most 32 bits
    tells, which is by chance in one process of four billions.
    """
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    return getattr(tracker, "manual_seed_all_cb", None) is not None or torch.initial_seed() < 2**32


def _is_numpy_seeded(numpy: Any) -> bool:
    """Whether somebody has seeded NumPy's generator, which has then lost what it began with."""
    try:
        return numpy.random.mtrand._rand._bit_generator._seed_seq is None
    except AttributeError:  # not public: another version may keep it elsewhere
        return True


def _seed_host(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
