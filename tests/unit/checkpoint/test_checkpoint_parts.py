"""The pure pieces of a checkpoint: shards, documents, names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest
import safetensors.torch
import torch
from checkpoints import WatchedStorage, write
from hypothesis import given
from hypothesis import strategies as some

from edl_hvd.checkpoint import Snapshot, restore
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.checksum import CHUNK_BYTES, checksum
from edl_hvd.checkpoint.format.entries import FileEntry, Piece, TensorEntry, stored_name
from edl_hvd.checkpoint.format.manifest import Manifest, Part
from edl_hvd.checkpoint.format.safetensors import read_header
from edl_hvd.checkpoint.format.shards import DTYPE_NAMES, pack
from edl_hvd.checkpoint.format.snapshot import _is_json, _plain_problems, check_plain, check_snapshot
from edl_hvd.errors import StateError, StorageError
from edl_hvd.storage import StoredObject

# Shards


def stored_and_restored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    storage = WatchedStorage()
    write(storage, Snapshot(tensors, step=1))
    return dict(restore(storage, 1).tensors)


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """Everything that has to survive: type, shape and every bit, those of NaNs too."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), data.numpy().tobytes()


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern the type has: denormals, infinities, NaNs with payloads."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=dtype)
    size_bytes = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (math.prod(shape) * size_bytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_every_type_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = {
        "scalar": random_bits(dtype),
        "one": random_bits(dtype, 1),
        "matrix": random_bits(dtype, 7, 5),
        "empty": random_bits(dtype, 0),
        "empty matrix": random_bits(dtype, 3, 0, 2),
    }
    for found in (safetensors.torch.load(b"".join(pack(tensors).data)), stored_and_restored(tensors)):
        assert {name: bits(tensor) for name, tensor in found.items()} == {
            name: bits(tensor) for name, tensor in tensors.items()
        }


def test_every_arrangement_in_memory_comes_back_as_the_same_values_with_memory_of_its_own() -> None:
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "every other column": base[:, ::2],
        "row": base[1],
        "overlaps row": base.reshape(-1)[4:9],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "channels last": images,
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negated view": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    found = stored_and_restored(tensors)
    for name, tensor in tensors.items():
        assert bits(found[name]) == bits(tensor), name
        assert not found[name].requires_grad
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(tensors)


@given(names=some.lists(some.text(), unique=True, max_size=8).filter(lambda names: "__metadata__" not in names))
def test_a_tensor_may_have_any_name(names: list[str]) -> None:
    tensors = {name: torch.tensor(number) for number, name in enumerate(names)}
    found = stored_and_restored(tensors)
    assert {name: int(tensor) for name, tensor in found.items()} == {name: n for n, name in enumerate(names)}


NAMES = some.sampled_from(["w", "w[rows 0:3]", "w[rows 0:3][rows 0:3]", "w[rows 3:5]", "w\n[rows 0:3]", ""])
PIECES = some.tuples(NAMES, some.integers(0, 5), some.integers(0, 5)).filter(lambda piece: piece[1] <= piece[2])


@given(one=PIECES, other=PIECES, rows=some.integers(5, 6), other_rows=some.integers(5, 6))
def test_no_two_pieces_have_the_same_name(
    one: tuple[str, int, int], other: tuple[str, int, int], rows: int, other_rows: int
) -> None:
    (name, first, end), (other_name, other_first, other_end) = one, other
    if one != other:
        called = stored_name(name, first, end - first, rows)
        other_rows = rows if name == other_name else other_rows
        assert called != stored_name(other_name, other_first, other_end - other_first, other_rows)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 8, 24, 100, CHUNK_BYTES])
def test_each_chunk_of_each_tensor_has_its_checksum_however_the_tensor_lies_in_memory(chunk_bytes: int) -> None:
    tensors = {"a": torch.randn(5, 3).t(), "b": torch.arange(7, dtype=torch.int16), "none": torch.empty(0)}
    packed = pack(tensors, chunk_bytes)
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        expected = [checksum(data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes)]
        assert packed.checksums()[name] == expected
    file = b"".join(packed.data)
    header = file[: packed.entry.header_bytes]
    assert packed.entry == FileEntry(len(file), len(header), checksum(header), chunk_bytes)
    assert len(header) % 8 == 0


def test_a_shard_is_written_from_where_its_tensors_lie() -> None:
    tensors = {"a": torch.randn(50, 3), "turned": torch.randn(4, 2).t(), "rows": torch.randn(10, 10)[2:5]}
    lies = {numpy.frombuffer(buffer, numpy.uint8).ctypes.data for buffer in pack(tensors).data if buffer.nbytes}
    assert {name for name, tensor in tensors.items() if tensor.data_ptr() in lies} == {"a", "rows"}


def test_each_look_at_the_snapshot_is_guarded_and_at_one_chunk() -> None:
    """So a writer that is given up lets go of the snapshot after one chunk."""
    tensors = {"a": torch.arange(100.0), "b": torch.arange(12.0).reshape(3, 4).t()}
    entered = []

    @contextmanager
    def guard() -> Iterator[None]:
        if len(entered) == 3:
            raise InterruptedError
        entered.append(torch.stack([tensor.sum() for tensor in tensors.values()]))
        yield

    with pytest.raises(InterruptedError):
        pack(tensors, chunk_bytes=100, guard=guard).checksums(guard)
    entered.clear()
    pack(tensors, chunk_bytes=400, guard=guard).checksums(guard)
    assert len(entered) == 3


@pytest.mark.parametrize(
    "data",
    [b"", b"short", b"\xff" * 8, b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{x"],
)
def test_bytes_that_are_no_shard_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        read_header(data, len(data))


def test_checksums_differ_for_any_flipped_bit() -> None:
    data = torch.randn(50).view(torch.uint8)
    original = checksum(data.numpy().data)
    for position in range(data.numel()):
        data[position] ^= 1 << (position % 8)
        assert checksum(data.numpy().data) != original
        data[position] ^= 1 << (position % 8)
    assert checksum(data.numpy().tobytes()) == original


# What a snapshot may hold


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (Snapshot({"w": torch.zeros(1, dtype=torch.complex128)}), "tensor 'w' is torch.complex128, .*expected one of"),
        (Snapshot({"w": torch.eye(2).to_sparse()}), "tensor 'w' has layout .*to_dense"),
        (Snapshot({"w": torch.zeros(1, device="meta")}), "tensor 'w' is on meta; expected host memory"),
        (Snapshot({"w": [1.0]}), "tensor 'w' is a list"),  # type: ignore[dict-item]
        (Snapshot({3: torch.zeros(1)}), "tensor name 3"),  # type: ignore[dict-item]
        (Snapshot({"__metadata__": torch.zeros(1)}), "tensor name '__metadata__'"),
        (Snapshot({"\ud800": torch.zeros(1)}), "valid Unicode"),
        (Snapshot({}, metrics={"loss": 1}), "metric 'loss' is 1; expected a float"),
        (Snapshot({}, metrics={3: 1.0}), "metric 3 is 1.0; expected a float under a name"),  # type: ignore[dict-item]
        (Snapshot({}, step=-1), "step=-1"),
        (Snapshot({}, samples=1.5), "samples=1.5"),  # type: ignore[arg-type]
    ],
)
def test_what_would_not_come_back_as_it_was_is_refused_by_name(snapshot: Snapshot, words: str) -> None:
    with pytest.raises(StateError, match=words):
        check_snapshot(snapshot)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"a": {"b": [1, (2, 3)]}}, r"plain\['a'\]\['b'\]\[1\] is a tuple; expected a JSON value"),
        ({"a": torch.zeros(1)}, r"plain\['a'\] is a Tensor"),
        ({1: 2}, "plain has the key 1; expected strings"),
    ],
)
def test_plain_state_that_is_no_json_is_refused_by_name(plain: dict[str, object], words: str) -> None:
    with pytest.raises(StateError, match=words):
        check_plain(plain)


def test_all_problems_of_a_snapshot_are_reported_at_once() -> None:
    snapshot = Snapshot({"a": torch.eye(2).to_sparse(), "b": torch.zeros(1, dtype=torch.complex128)}, step=-3)
    with pytest.raises(StateError) as caught:
        check_snapshot(snapshot)
    assert [name in str(caught.value) for name in ("'a'", "'b'", "step=-3")] == [True] * 3
    with pytest.raises(StateError) as caught:
        check_plain({"c": set(), "d": (1,)})
    assert [name in str(caught.value) for name in ("'c'", "'d'")] == [True] * 2


# Documents


def a_manifest() -> Manifest:
    plain = {"loss": [float("inf"), -0.0, 1e-300, 2**70], "text": 'ü\n"\ud800', "nothing": None, "nested": {"": True}}
    file = object_keys.shard_name(0, 1)
    return Manifest(
        attempt="a-1", step=7, epoch=1, samples=70, metrics={"loss": 0.5, "": float("-inf")}, world_size=1,
        created="2026-01-01T00:00:00.000+00:00",
        versions={"torch": "2"}, plain=plain, files={file: FileEntry(22, 10, checksum(b"x"), 16)},
        tensors={"w": TensorEntry("float32", [3], [Piece(file, 0, 3, [checksum(b"y")])])},
    )  # fmt: skip


def test_documents_come_back_equal_and_in_order() -> None:
    manifest = a_manifest()
    assert Manifest.decode(manifest.encode()) == manifest
    assert list(Manifest.decode(manifest.encode()).plain) == list(manifest.plain)
    part = Part(3, 7, 1, 70, manifest.files, manifest.tensors, {"a": "0123456789abcdef"})
    assert Part.decode(part.encode()) == part
    assert math.isnan(Manifest.decode(_with_plain({"x": math.nan}).encode()).plain["x"])


def _with_plain(plain: dict[str, object]) -> Manifest:
    return Manifest(**{**vars(a_manifest()), "plain": plain})


def test_no_damage_to_any_byte_of_a_manifest_goes_unnoticed() -> None:
    manifest = a_manifest()
    data = manifest.encode()
    for position in range(len(data)):
        for flipped in (data[position] ^ 1, data[position] ^ 32, 0):
            damaged = data[:position] + bytes([flipped]) + data[position + 1 :]
            try:
                assert Manifest.decode(damaged) == manifest  # a changed blank at the end, or 1E9 for 1e9
            except (ValueError, StorageError):
                continue
    for length in range(len(data) - 1):
        with pytest.raises(ValueError, match=r"not JSON|not a document"):
            Manifest.decode(data[:length])


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"content": {}}', b'{"format": 1, "content": []}', b"[" * 100_000])
def test_json_that_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, StorageError)):
        Manifest.decode(data)


def test_a_manifest_of_a_later_format_is_not_taken_for_damage() -> None:
    with pytest.raises(StorageError, match="has format 4, this version of edl_hvd reads format 3"):
        Manifest.decode(a_manifest().encode().replace(b'"format":3', b'"format":4', 1))


@pytest.mark.parametrize("former", [1, 2])
def test_a_manifest_of_a_former_format_is_said_to_be_one(former: int) -> None:
    with pytest.raises(
        StorageError, match=rf"has format {former} \(that of development versions from before .*\), this version"
    ):
        Manifest.decode(a_manifest().encode().replace(b'"format":3', b'"format":%d' % former, 1))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "parts/x", "manifest.json", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(name: str) -> None:
    manifest = Manifest(**{**vars(a_manifest()), "files": {name: FileEntry(1, 1, "", 1)}, "tensors": {}})
    with pytest.raises(ValueError, match="unexpected files"):
        Manifest.decode(manifest.encode())


# Names


def test_listed_are_the_steps_with_a_manifest_newest_first_however_long_their_numbers() -> None:
    listed = [object_keys.manifest_key(step) for step in (10**13, 3, 20)]
    others = [object_keys.folder(5) + object_keys.shard_name(0, 1), "checkpoints/x/manifest.json", "other"]
    assert list(object_keys.manifests([StoredObject(key, 1) for key in listed + others])) == [10**13, 20, 3]


LEAVES = some.none() | some.booleans() | some.integers() | some.floats() | some.text() | some.binary(max_size=2)
VALUES = some.recursive(
    LEAVES | some.tuples(some.integers()),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text() | some.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(value=VALUES)
def test_the_quick_look_at_plain_state_finds_what_the_thorough_one_does(value: object) -> None:
    assert _is_json(value) == (not list(_plain_problems(value, "plain")))
