"""Anything at all in the place of a checkpoint: a clear error, no code run, no memory beyond what is there.

Most of this cannot happen by accident, as checksums catch accidents. So the damage here is signed: whoever made it
also recomputed the checksums, and only a reader that looks at every value finds out.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import damaged_manifests
import damaged_shards
import pytest
import torch
from checkpoints import assert_equal, write
from corruption import (
    CHUNK_BYTES,
    COUNTS,
    EMPTY,
    EXPLODED,
    MANIFEST,
    ORIGINAL,
    OTHER_SHARD,
    PIECE,
    SHARD,
    SPLIT,
    WEIGHT,
    Bomb,
    Case,
    JsonObject,
    Victim,
    checksum,
    json_bytes,
    new_victim,
    newest,
    refusal,
    snapshot_of,
)

from edl_hvd.checkpoint import Snapshot, restore
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.manifest import Part
from edl_hvd.errors import CheckpointDamagedError, StorageError
from edl_hvd.events import CheckpointDamaged, CheckpointFailed, CheckpointWritten
from edl_hvd.storage import open_storage

CASES = {**damaged_manifests.CASES, **damaged_shards.CASES}

# What a JSON parser makes of "[[],[],...]" is 25 times as long as the text; nothing else comes near.
MEMORY_PER_BYTE, MEMORY_AT_LEAST = 40, 256 * 1024


def test_there_are_enough_kinds_of_damage_and_without_any_the_checkpoint_restores() -> None:
    assert len(CASES) >= 60
    victim = new_victim()
    assert victim.header()[0].keys() == {WEIGHT, COUNTS, EMPTY, PIECE}
    pieces = victim.content()["tensors"][SPLIT]["pieces"]
    assert [(piece["file"], piece["first_row"], piece["rows"]) for piece in pieces] == [
        (OTHER_SHARD, 0, 5),
        (SHARD, 5, 15),
    ]
    assert [len(piece["checksums"]) for piece in pieces] == [1, 2]
    found, events = newest(victim.storage)
    assert_equal(found, snapshot_of(20))
    assert events == []
    victim.sign(victim.content())
    victim.put_header(*victim.header())
    assert_equal(restore(victim.storage, 20), snapshot_of(20))


def test_the_pickles_among_the_damage_would_do_something(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    assert (tmp_path / "exploded").is_dir()


@pytest.mark.parametrize("case", CASES.values(), ids=[name.encode("unicode_escape").decode() for name in CASES])
def test_what_is_wrong_is_said_and_the_older_checkpoint_used(case: Case) -> None:
    victim = new_victim()
    before = list(victim.storage.list())
    case.damage(victim)
    assert [
        (entry.key, victim.storage.read(entry.key)) for entry in before if victim.storage.exists(entry.key)
    ] != list(ORIGINAL.items()), "nothing was damaged"
    error = refusal(victim.storage)
    assert isinstance(error, CheckpointDamagedError)
    assert "000000000020/" + case.blamed in str(error)
    assert victim.storage.url in str(error)
    assert len(str(error)) < 2000
    assert re.search(case.words, str(error), re.DOTALL), str(error)
    found, events = newest(victim.storage)
    assert_equal(found, snapshot_of(10))
    assert events == [CheckpointDamaged(url=victim.storage.url, step=20, reason=str(error))]
    assert not os.path.exists(EXPLODED)


def test_no_damage_takes_more_memory_than_a_small_multiple_of_what_is_there() -> None:
    """What Python allocates; the test below covers what torch and safetensors do."""
    newest(new_victim().storage)  # What is allocated only once.
    for name, case in CASES.items():
        victim = new_victim()
        case.damage(victim)
        there_bytes = sum(entry.size_bytes for entry in victim.storage.list(object_keys.folder(20)))
        tracemalloc.start()
        try:
            refusal(victim.storage)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes <= MEMORY_AT_LEAST + MEMORY_PER_BYTE * there_bytes, name


def refuse_all_within(limit_bytes: int) -> None:
    """In a process of its own: every case, with no more memory for all of it than this."""
    torch.set_num_threads(1)
    newest(new_victim().storage)
    now_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line
    )
    resource.setrlimit(resource.RLIMIT_AS, (1024 * now_kib + limit_bytes,) * 2)
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(2 * limit_bytes, dtype=torch.uint8)  # The limit is there.
    for name, case in CASES.items():
        victim = new_victim()
        case.damage(victim)
        error = refusal(victim.storage)
        assert isinstance(error, CheckpointDamagedError), name
        assert re.search(case.words, str(error), re.DOTALL), (name, str(error))
        assert_equal(newest(victim.storage)[0], snapshot_of(10))


def test_every_damage_is_refused_in_a_process_that_has_little_memory() -> None:
    limit_bytes = 256 * 1024 * 1024  # The shard that is a million times too long has 30 million bytes.
    command = f"import test_checkpoint_damage as damage; damage.refuse_all_within({limit_bytes})"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # glibc sets 64 MB of addresses aside for each thread that happens to allocate while another does.
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def damaged_variants(data: bytes, numbers: random.Random) -> Iterator[bytes]:
    """One bit flipped in each byte, each byte removed, one put before each, and every length but the whole."""
    for position in range(len(data)):
        flipped = data[position] ^ (1 << numbers.randrange(8))
        yield data[:position] + bytes([flipped]) + data[position + 1 :]
        yield data[:position] + data[position + 1 :]
        yield data[:position] + bytes([numbers.randrange(256)]) + data[position:]
        yield data[:position]


@pytest.mark.parametrize(("name", "signed"), [(MANIFEST, False), (SHARD, False), (SHARD, True)])
def test_whatever_byte_is_changed_added_or_lost_nothing_else_than_the_checkpoint_restores(
    name: str, signed: bool
) -> None:
    """A signed shard of other values cannot be made this way: the manifest has a checksum for each tensor."""
    victim = new_victim()
    original = victim.bytes_of(name)
    refused, later_formats = 0, []
    for data in damaged_variants(original, random.Random(5)):
        (victim.put_shard if signed else lambda data: victim.put(name, data))(data)
        try:
            assert_equal(restore(victim.storage, 20), snapshot_of(20))
        except CheckpointDamagedError:
            refused += 1
        except StorageError as error:
            later_formats.append(str(error))
    # A blank instead of the line's end, or none, or 0.50 for 0.5: next to no other change is harmless.
    assert refused >= 4 * len(original) - 20
    assert all("use the version that wrote it" in message for message in later_formats)
    assert len(later_formats) <= 4


NASTY = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63 - 1,
    2**64,
    1.5,
    float("nan"),
    "",
    "x",
    "BF16",
    SHARD,
    [],
    [0],
    [[]],
    {},
    {"a": 1},
)


def places(value: object) -> list[tuple[Any, Any]]:
    """Every list or object inside of ``value`` with every index or key it has."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_whatever_value_is_replaced_and_signed_the_tensors_restore_as_they_were_or_not_at_all(name: str) -> None:
    numbers = random.Random(11)
    refused = 0
    for _ in range(400):
        victim = new_victim()
        fields, data = (victim.content(), b"") if name == MANIFEST else victim.header()
        container, key = numbers.choice(places(fields))
        container[key] = numbers.choice(NASTY)
        if numbers.random() < 0.2:
            container.pop(key)
        victim.sign(fields) if name == MANIFEST else victim.put_header(fields, data)
        try:
            found = restore(victim.storage, 20)
        except CheckpointDamagedError:
            refused += 1
        else:
            # What is for people only, the plain state and the counts may say something else; that is what was signed.
            assert_equal(dataclasses.replace(snapshot_of(20), **progress(found)), found)
    assert refused > 300


def progress(snapshot: Snapshot) -> JsonObject:
    return {name: getattr(snapshot, name) for name in ("plain", "step", "epoch", "samples")}


def test_lists_of_any_depth_in_the_plain_state_restore_or_are_damage() -> None:
    outcomes = []
    for levels in range(50, 1200, 25):
        victim = new_victim()
        text = b"[" * levels + b"]" * levels
        content = json_bytes(victim.content()).replace(b'"rate":0.5', b'"rate":' + text)
        victim.put(MANIFEST, b'{"format":3,"checksum":"%s","content":%s}' % (checksum(content).encode(), content))
        found, events = newest(victim.storage)
        assert found is not None
        outcomes.append((found.step, len(events)))
    assert set(outcomes) == {(20, 0), (10, 1)}
    assert outcomes == sorted(outcomes, reverse=True), "deeper ones are refused"


def test_a_manifest_of_a_later_format_is_not_read_any_further() -> None:
    victim = new_victim()
    victim.sign([], format=4, shards=7)
    error = refusal(victim.storage)
    assert not isinstance(error, CheckpointDamagedError)
    assert "format 4, this version of edl_hvd reads format 3; use the version that wrote it" in str(error)


def a_part() -> JsonObject:
    files = {
        SHARD: {"size_bytes": 102, "header_bytes": 100, "header_checksum": checksum(b""), "chunk_bytes": CHUNK_BYTES}
    }
    piece = {"file": SHARD, "first_row": 1, "rows": 2, "checksums": [checksum(b"")]}
    tensors = {WEIGHT: {"dtype": "uint8", "shape": [3], "pieces": [piece]}}
    numbers = {"rank": 1, "step": 20, "epoch": 0, "samples": 5}
    return {**numbers, "files": files, "tensors": tensors, "digests": {WEIGHT: "0123456789abcdef"}, "failure": None}


@pytest.mark.parametrize("field", a_part())
@pytest.mark.parametrize("wrong", [True, -1, 0.5, [1], {"x": 1}, 2**70])
def test_what_another_rank_says_it_wrote_is_not_believed_either(field: str, wrong: object) -> None:
    def signed(part: JsonObject) -> bytes:
        return json_bytes({"format": 3, "checksum": checksum(json_bytes(part)), "content": part})

    assert Part.decode(signed(a_part())).tensors[WEIGHT].shape == [3]
    with pytest.raises(
        ValueError, match=rf"({field}|file 'x'|tensor 'x'|digest 'x'|unexpected files).*(expected|shard's name)"
    ):
        Part.decode(signed({**a_part(), field: wrong}))
    lacking = a_part()
    del lacking[field]
    with pytest.raises(ValueError, match=f"lacks '{field}'"):
        Part.decode(signed(lacking))


def test_no_manifest_is_written_that_would_be_too_large_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_hvd.checkpoint.format.document.LARGEST_BYTES", 2000)
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    [[event]] = write(storage, Snapshot({}, {"text": "x" * 1000}, 1))
    assert isinstance(event, CheckpointWritten)
    [[event]] = write(storage, Snapshot({}, {"text": "x" * 2000}, 2))
    assert isinstance(event, CheckpointFailed)
    assert "bytes as JSON; expected at most 2000, keep large values of the state as tensors" in event.reason
    assert [entry.key for entry in storage.list()] == [object_keys.manifest_key(1)]


# Files that are none


@pytest.fixture
def on_disk(tmp_path: Path) -> Victim:
    storage = open_storage(str(tmp_path / "run"))
    for key, data in ORIGINAL.items():
        storage.write(key, data)
    return Victim(storage)


def in_place_of(victim: Victim, name: str) -> Path:
    path = Path(victim.storage.url.removeprefix("file://")) / object_keys.folder(20) / name
    path.rename(path.parents[3] / "moved")
    return path


def link_out(path: Path) -> None:
    path.symlink_to(path.parents[3] / "moved")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_without_an_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"")


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link out of the folder": (link_out, "symbolic link"),
    "link to nothing": (link_to_nothing, "symbolic link"),
    "link to itself": (link_to_itself, "symbolic link"),
    "link to a device": (link_without_an_end, "symbolic link"),
    "pipe that nobody writes to": (os.mkfifo, "a pipe"),
    "folder": (folder_with_a_file, "a folder"),
}


@pytest.mark.parametrize(("make", "words"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_no_shard(on_disk: Victim, make: Callable[[Path], object], words: str) -> None:
    make(in_place_of(on_disk, SHARD))
    error = refusal(on_disk.storage)
    assert isinstance(error, CheckpointDamagedError)
    assert f"000000000020/{SHARD}" in str(error)
    assert words in str(error)
    found, events = newest(on_disk.storage)
    assert_equal(found, snapshot_of(10))
    assert events == [CheckpointDamaged(url=on_disk.storage.url, step=20, reason=str(error))]


@pytest.mark.parametrize(("make", "words"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_no_manifest(on_disk: Victim, make: Callable[[Path], object], words: str) -> None:
    make(in_place_of(on_disk, MANIFEST))
    error = refusal(on_disk.storage)
    assert "000000000020/manifest.json" in str(error)
    assert words in str(error)
    found, events = newest(on_disk.storage)
    assert_equal(found, snapshot_of(10))
    if words == "a folder":
        assert events == [], "then no checkpoint is listed at all"
        return
    assert isinstance(error, CheckpointDamagedError)
    assert events == [CheckpointDamaged(url=on_disk.storage.url, step=20, reason=str(error))]


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_a_file_of_a_terabyte_is_refused_unread(on_disk: Victim, name: str) -> None:
    path = in_place_of(on_disk, name)
    path.write_bytes(b"")
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        error = refusal(on_disk.storage)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, CheckpointDamagedError)
    assert f"000000000020/{name}" in str(error)
    assert f"it has {2**40} bytes, more than the" in str(error)
    assert peak_bytes < MEMORY_AT_LEAST
    found, events = newest(on_disk.storage)
    assert_equal(found, snapshot_of(10))
    assert [type(event) for event in events] == [CheckpointDamaged]


@pytest.mark.parametrize("name", ["0000000000030", "30", "\u0663" * 12, "9" * 19, "9" * 200, "00000000003a"])
def test_a_folder_whose_name_is_no_step_is_not_listed(on_disk: Victim, name: str) -> None:
    on_disk.storage.write(f"checkpoints/{name}/{MANIFEST}", on_disk.bytes_of(MANIFEST))
    found, events = newest(on_disk.storage)
    assert_equal(found, snapshot_of(20))
    assert events == []
