"""Names of a checkpoint's objects; nothing else in the package spells a key.

Below the storage's URL:

    checkpoints/000000012345/tensors-00000-of-00004.safetensors    one per rank that has a share
    checkpoints/000000012345/parts/<attempt>-00000.json            what that rank wrote; gone once visible
    checkpoints/000000012345/manifest.json                         written last: its presence is the commit
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edl_hvd.storage import StoredObject

ROOT = "checkpoints/"

_IN_A_CHECKPOINT = re.compile(r"checkpoints/([0-9]{12}|[1-9][0-9]{12,17})/(.+)", re.DOTALL)
_MANIFEST = "manifest.json"
_SHARD = re.compile(r"tensors-[0-9]{5,}-of-[0-9]{5,}(-[A-Za-z0-9_.-]+)?\.safetensors")
_ATTEMPT = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def folder(step: int) -> str:
    """Prefix of everything that belongs to the checkpoint of ``step``, ending in ``/``."""
    return f"{ROOT}{step:012d}/"


def manifest_key(step: int) -> str:
    return folder(step) + _MANIFEST


def shard_name(rank: int, size: int, attempt: str | None = None) -> str:
    """File name of a rank's share; with ``attempt`` the name to use when the plain one is taken.

    >>> shard_name(0, 4)
    'tensors-00000-of-00004.safetensors'
    """
    suffix = f"-{attempt}" if attempt else ""
    return f"tensors-{rank:05d}-of-{size:05d}{suffix}.safetensors"


def parts_prefix(step: int) -> str:
    return f"{folder(step)}parts/"


def part_key(step: int, attempt: str, rank: int) -> str:
    return f"{parts_prefix(step)}{attempt}-{rank:05d}.json"


def is_shard_name(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_attempt_name(name: str) -> bool:
    return _ATTEMPT.fullmatch(name) is not None


def step_of(key: str) -> int | None:
    """The step whose checkpoint ``key`` belongs to, or ``None`` for a stranger's object."""
    match = _IN_A_CHECKPOINT.fullmatch(key)
    return int(match[1]) if match else None


def listed_steps(objects: Iterable[StoredObject]) -> list[int]:
    """Steps that have a manifest among ``objects``, newest first."""
    matches = (_IN_A_CHECKPOINT.fullmatch(entry.key) for entry in objects)
    return sorted((int(match[1]) for match in matches if match and match[2] == _MANIFEST), reverse=True)
