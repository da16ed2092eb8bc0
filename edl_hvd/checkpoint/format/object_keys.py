"""Names of a checkpoint's objects; nothing else in the package spells a key.

Below the storage's URL:

    checkpoints/000000012345/tensors-00000-of-00004.safetensors    one per rank that has a share
    checkpoints/000000012345/parts/<attempt>-00000.json            what that rank wrote; gone once visible
    checkpoints/000000012345/parts/saver-00001.json                who writes the last one, see ``saver_claim.py``
    checkpoints/000000012345/manifest.json                         written last: its presence is the commit
    checkpoints/000000012345/manifest-00002.json                   that of the URL's second owner, see ``lease.py``
    owners/00002.json, 00002-alive.json, 00002-accepted.json       who that is, its signs of life, what it found
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edl_hvd.storage import StoredObject

ROOT = "checkpoints/"
OWNERS = "owners/"

_IN_A_CHECKPOINT = re.compile(r"checkpoints/([0-9]{12}|[1-9][0-9]{12,17})/(.+)", re.DOTALL)
_OWNER = r"[0-9]{5}|[1-9][0-9]{5,8}"
_OWNER_KEY = re.compile(rf"owners/({_OWNER})(-alive|-accepted|)\.json")
_ATTEMPT = r"[A-Za-z0-9_.-]{1,100}"
_MANIFEST = re.compile(rf"manifest(?:-({_OWNER})(?:-({_ATTEMPT}))?)?\.json")
_SHARD = re.compile(r"tensors-[0-9]{5,}-of-[0-9]{5,}(-[A-Za-z0-9_.-]+)?\.safetensors")

FIRST_OWNER = 1
# Whose manifests have the plain name; so have those that were copied to a URL that nobody owns.


def folder(step: int) -> str:
    """Prefix of everything that belongs to the checkpoint of ``step``, ending in ``/``."""
    return f"{ROOT}{step:012d}/"


def manifest_key(step: int, owner: int = FIRST_OWNER, attempt: str | None = None) -> str:
    """The manifest of an owner's checkpoint; with ``attempt`` the name to use when the plain one is taken.

    >>> manifest_key(5, owner=2)
    'checkpoints/000000000005/manifest-00002.json'
    """
    if owner <= FIRST_OWNER and attempt is None:
        return f"{folder(step)}manifest.json"
    suffix = f"-{attempt}" if attempt else ""
    return f"{folder(step)}manifest-{max(owner, FIRST_OWNER):05d}{suffix}.json"


def owner_of(manifest_key: str) -> int:
    """Number of the owner whose manifest this is."""
    match = _MANIFEST.fullmatch(manifest_key.rpartition("/")[2])
    return int(match[1] or FIRST_OWNER) if match else 0


def owner_key(owner: int) -> str:
    return f"{OWNERS}{owner:05d}.json"


def alive_key(owner: int) -> str:
    return f"{OWNERS}{owner:05d}-alive.json"


def accepted_key(owner: int) -> str:
    return f"{OWNERS}{owner:05d}-accepted.json"


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


def saver_key(step: int, owner: int) -> str:
    """The claim of the worker that writes the owner's last checkpoint; left behind, it is an orphan as other parts."""
    return f"{parts_prefix(step)}saver-{owner:05d}.json"


def is_shard_name(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_attempt_name(name: str) -> bool:
    return re.fullmatch(_ATTEMPT, name) is not None


def step_of(key: str) -> int | None:
    """The step whose checkpoint ``key`` belongs to, or ``None`` for a stranger's object."""
    match = _IN_A_CHECKPOINT.fullmatch(key)
    return int(match[1]) if match else None


def manifests(objects: Iterable[StoredObject]) -> dict[int, list[str]]:
    """Keys of the manifests among ``objects`` by step, newest step first; of a step the one that counts most first.

    That of a later owner counts more, and of one owner that which was written because the plain name was taken.
    """
    found: dict[int, list[tuple[int, str, str]]] = {}
    for entry in objects:
        match = _IN_A_CHECKPOINT.fullmatch(entry.key)
        name = match and _MANIFEST.fullmatch(match[2])
        if match and name:
            found.setdefault(int(match[1]), []).append((int(name[1] or FIRST_OWNER), name[2] or "", entry.key))
    return {step: [key for _, _, key in sorted(found[step], reverse=True)] for step in sorted(found, reverse=True)}


def owners(objects: Iterable[StoredObject]) -> list[int]:
    """Numbers of the owners among ``objects``, newest first."""
    return _numbers(objects, "")


def accepting_owners(objects: Iterable[StoredObject]) -> list[int]:
    """Numbers of the owners that have said what they found, newest first."""
    return _numbers(objects, "-accepted")


def _numbers(objects: Iterable[StoredObject], kind: str) -> list[int]:
    matches = (_OWNER_KEY.fullmatch(entry.key) for entry in objects)
    return sorted((int(match[1]) for match in matches if match and match[2] == kind), reverse=True)
