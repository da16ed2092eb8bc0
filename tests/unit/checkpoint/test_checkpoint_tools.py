"""What the commands for checkpoints are made of: deciding what goes, the order of writing, files of weights."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import uuid
import zipfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import WatchedStorage, snapshot_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_hvd.checkpoint import Snapshot
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import Piece, TensorEntry
from edl_hvd.checkpoint.format.safetensors import ELEMENT_TYPES
from edl_hvd.checkpoint.format.shards import DTYPE_NAMES
from edl_hvd.checkpoint.reading.catalog import Catalog
from edl_hvd.checkpoint.reading.files import read_listed
from edl_hvd.checkpoint.retention.policy import RetentionPolicy, carry_out, plan, plan_for
from edl_hvd.checkpoint.tools.copying import copy, copy_each
from edl_hvd.checkpoint.tools.export import modules_of
from edl_hvd.checkpoint.tools.inspection import verify_each
from edl_hvd.checkpoint.tools.weight_files import write_safetensors, write_torch
from edl_hvd.errors import CheckpointDamagedError, ObjectExistsError, StorageError
from edl_hvd.events import CheckpointWritten
from edl_hvd.storage import StoredObject, open_storage
from edl_hvd.values import Best, Interval


def quiet(done: int, whole: int) -> None:
    """Nobody watches."""


def program(text: str) -> str:
    return subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout.strip()


# Without torch


def test_importing_the_package_or_the_command_line_does_not_import_torch() -> None:
    modules = (
        "", ".tools.inspection", ".tools.copying", ".tools.export", ".reading.files", ".retention.policy",
        ".format.manifest", ".format.object_keys",
    )  # fmt: skip
    imports = "".join(f"import edl_hvd.checkpoint{module}\n" for module in modules)
    text = (
        f"import sys\n{imports}import edl_hvd.cli.main\nprint({{'torch', 'numpy', 'safetensors'}} & set(sys.modules))"
    )
    assert program(text) == "set()"


@pytest.mark.parametrize(
    "first", ["import edl_hvd.checkpoint.reading.restoring", "from edl_hvd.checkpoint import steps"]
)
def test_restore_is_the_function_whatever_was_imported_first(first: str) -> None:
    text = f"{first}\nfrom edl_hvd.checkpoint import restore, CheckpointWriter, Snapshot\nprint(restore.__name__)"
    assert program(text) == "restore"


# Pruning


@st.composite
def listings(draw: st.DrawFn) -> tuple[list[StoredObject], set[int]]:
    """Objects of checkpoints, some without a manifest, and which of the steps are intact."""
    steps = draw(st.sets(st.integers(1, 30), max_size=8))
    objects, intact = [StoredObject("notes.txt", 3)], set()
    for step in steps:
        objects.append(StoredObject(object_keys.folder(step) + object_keys.shard_name(0, 1), 10))
        if draw(st.booleans()):
            objects.append(StoredObject(object_keys.manifest_key(step), 5))
            if draw(st.booleans()):
                intact.add(step)
    return sorted(objects), intact


@settings(max_examples=300)
@given(listings(), st.integers(1, 5))
def test_pruning_by_hand_decides_as_after_the_newest_intact_checkpoint(
    listing: tuple[list[StoredObject], set[int]], keep: int
) -> None:
    objects, intact = listing
    found = plan(Catalog.of(objects), RetentionPolicy(keep), {}, intact.__contains__)
    if not intact:
        assert found.keys == []
        return
    assert found == plan(Catalog.of(objects), RetentionPolicy(keep), {}, intact.__contains__, written=max(intact))
    assert found.kept == sorted(intact, reverse=True)[:keep]
    listed = list(object_keys.manifests(objects))
    assert sorted(found.kept + found.spared + found.removed, reverse=True) == listed
    stay = {object_keys.folder(step) for step in found.kept + found.spared}
    assert not [key for key in found.keys if any(key.startswith(folder) for folder in stay)]


@pytest.mark.parametrize(
    "keep",
    [RetentionPolicy(1), RetentionPolicy(1, Interval(20, "steps")), RetentionPolicy(1, None, Best("accuracy", "max"))],
)
def test_pruning_that_stops_anywhere_leaves_no_torn_checkpoint(keep: RetentionPolicy) -> None:
    class StopError(Exception):
        """Ends the work in the middle."""

    for allowed in range(9):
        storage = WatchedStorage()
        for step in (10, 20, 30):
            write(storage, replace(snapshot_of(step), metrics={"accuracy": 1 / step}), size=3, keep=9)
        deleted: list[str] = []

        def watch(method: str, key: str, deleted: list[str] = deleted, allowed: int = allowed) -> None:
            if method == "delete":
                if len(deleted) == allowed:
                    raise StopError
                deleted.append(key)

        storage.watch = watch
        with contextlib.suppress(StopError):
            carry_out(storage, plan_for(storage, keep), quiet)
        listed = list(object_keys.manifests(storage.list(object_keys.ROOT)))
        assert listed[0] == 30
        assert not any(found.damaged for found in verify_each(storage, listed, quiet))


def test_a_checkpoint_of_another_version_is_not_this_ones_to_count_or_to_remove(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    for step in (10, 30):
        write(storage, snapshot_of(step), keep=9)
    storage.write(object_keys.manifest_key(20), b'{"format": 1}')
    before = storage.list()
    with pytest.raises(StorageError, match=r"format 1 .*use the version that wrote it"):
        plan_for(storage, RetentionPolicy(2))
    with caplog.at_level(logging.WARNING):
        [[event]] = write(storage, snapshot_of(40), keep=3)
    assert isinstance(event, CheckpointWritten)
    assert "cannot remove old checkpoints" in caplog.text
    assert [entry for entry in storage.list() if "40/" not in entry.key] == before
    assert plan_for(storage, RetentionPolicy(1)).removed == [30, 20, 10], (
        "once enough newer ones are there it is not looked at"
    )
    assert plan_for(storage, RetentionPolicy(1, Interval(20, "steps"))).removed == [30, 10], "its step says enough"
    for keep in (
        RetentionPolicy(1, Interval(1, "epochs")),
        RetentionPolicy(1, Interval(32, "samples")),
        RetentionPolicy(1, None, Best("a", "min")),
    ):
        with pytest.raises(StorageError, match="format 1"):
            plan_for(storage, keep)


# Copying


def test_the_manifest_is_created_after_every_file_and_nothing_is_replaced() -> None:
    source, calls = WatchedStorage(), []
    write(source, snapshot_of(10), size=3)
    target = WatchedStorage(lambda method, key: calls.append((method, key)))
    assert copy(source, target, 10, quiet)
    writes = [(method, key) for method, key in calls if method.startswith("write")]
    assert len(writes) == 4
    assert {method for method, _ in writes} == {"write_new"}
    assert writes[-1][1] == object_keys.manifest_key(10)


def test_of_two_copies_at_once_the_second_finds_the_first() -> None:
    source, target = WatchedStorage(), WatchedStorage()
    write(source, snapshot_of(10), size=2)

    def other_comes_first(method: str, key: str) -> None:
        if method == "write_new" and key == object_keys.manifest_key(10):
            target.watch = lambda method, key: None
            assert copy(source, target, 10, quiet)

    target.watch = other_comes_first
    assert copy(source, target, 10, quiet)
    assert [found.damaged for found in verify_each(target, [10], quiet)] == [{}]


def test_a_different_checkpoint_that_comes_first_is_left_as_it_is() -> None:
    source, target = WatchedStorage(), WatchedStorage()
    write(source, snapshot_of(10))

    def other_comes_first(method: str, key: str) -> None:
        if method == "write_new" and key == object_keys.manifest_key(10):
            target.watch = lambda method, key: None
            target.write_new(key, b"another")

    target.watch = other_comes_first
    with pytest.raises(ObjectExistsError, match="a different checkpoint of step 10"):
        copy(source, target, 10, quiet)
    assert target.read(object_keys.manifest_key(10)) == b"another"


def test_what_retention_removes_meanwhile_is_told_and_the_rest_is_copied() -> None:
    source = open_storage(f"memory://{uuid.uuid4().hex}")
    for step in (10, 20):
        write(source, snapshot_of(step))
    source.delete(object_keys.manifest_key(10))
    found = list(copy_each(source, open_storage(f"memory://{uuid.uuid4().hex}"), [10, 20], quiet))
    assert [bool(one.problem) for one in found] == [True, False]
    assert [one.step for one in verify_each(source, [10, 20], quiet)] == [20]


def test_a_manifest_of_another_step_or_format_is_a_finding_and_not_the_end() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, snapshot_of(10))
    storage.write(object_keys.manifest_key(20), storage.read(object_keys.manifest_key(10)))
    storage.write(object_keys.manifest_key(30), b'{"format": 4}')
    newest, middle, oldest = verify_each(storage, [30, 20, 10], quiet)
    assert "reads format 3" in newest.damaged[object_keys.manifest_key(30)]
    assert "belongs to step 10" in middle.damaged[object_keys.manifest_key(20)]
    assert oldest.damaged == {}
    with pytest.raises(CheckpointDamagedError):
        read_listed(storage, 20)


# Files of weights


def example_tensors() -> dict[str, torch.Tensor]:
    """Every type there is, in every kind of shape, under odd names."""
    numbers = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype, name in DTYPE_NAMES.items():
        data = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=numbers)
        data = data % 2 if dtype == torch.bool else data
        tensors[f"{name}.weight"] = data.view(dtype).reshape(2, 3)
        tensors[f"{name}/schräg \n{{}}"] = data.view(dtype).reshape(3, 1, 2)
        tensors[f"{name}.scalar"] = data.view(dtype)[0].clone()
        tensors[f"{name}.none"] = data.view(dtype)[:0].reshape(0, 4)
    return tensors


def entry_of(tensor: torch.Tensor) -> TensorEntry:
    rows = tensor.shape[0] if tensor.dim() else 1
    return TensorEntry(DTYPE_NAMES[tensor.dtype], list(tensor.shape), [Piece("file", 0, rows, [])])


def data_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@pytest.mark.parametrize("writer", [write_torch, write_safetensors])
def test_a_file_of_weights_holds_every_type_and_shape_bit_for_bit(writer: Any, tmp_path: Any) -> None:
    tensors = example_tensors()
    assert {name.partition(".")[0].partition("/")[0] for name in tensors} == ELEMENT_TYPES.keys()
    pieces = ((name, data_of(tensors[name])) for name in reversed(tensors))
    with open(tmp_path / "file", "wb") as file:
        writer(file, {name: entry_of(tensor) for name, tensor in tensors.items()}, pieces)
    if writer is write_torch:
        reads = [torch.load(tmp_path / "file", weights_only=True, mmap=mapped) for mapped in (False, True)]
        assert list(reads[0]) == list(tensors)
    else:
        from safetensors.torch import load, load_file

        reads = [load((tmp_path / "file").read_bytes()), load_file(tmp_path / "file")]
    for read in reads:
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
            assert bytes(data_of(read[name].contiguous())) == bytes(data_of(tensor)), name
            assert read[name].stride() == tensor.contiguous().stride() or 0 in tensor.shape, name


@pytest.mark.parametrize("limit_bytes", [zipfile.ZIP64_LIMIT, 10], ids=["small", "as if above 2 GiB"])
def test_every_tensor_begins_where_its_elements_can_be_mapped(
    limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit_bytes)
    tensors = {name: tensor for name, tensor in example_tensors().items() if tensor.numel()}
    entries = {name: entry_of(tensor) for name, tensor in tensors.items()}
    file = io.BytesIO()
    write_torch(file, entries, ((name, data_of(tensor)) for name, tensor in tensors.items()))
    reader = torch._C.PyTorchFileReader(io.BytesIO(file.getvalue()))
    records = [name for name in reader.get_all_records() if name.startswith("data/")]
    assert len(records) == len(tensors)
    assert [reader.get_record_offset(name) % 64 for name in records] == [0] * len(records)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(bytes(data_of(read[name])) == bytes(data_of(tensor)) for name, tensor in tensors.items())


# Whose weights


def manifest_with(attributes: dict[str, Any]) -> Any:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, Snapshot({"model/w": torch.ones(2)}, {"attributes": attributes}, 10))
    return read_listed(storage, 10).manifest


def test_a_module_is_what_has_nothing_but_tensors_under_names() -> None:
    tensor = {"__tensor__": "model/w"}
    attributes = {
        "model": {"w": tensor},
        "odd": {"__mapping__": [["__tensor__", tensor], ["w", tensor]]},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "scheduler": {"last_epoch": 3},
        "generator": tensor,
        "list": [tensor],
        "mixed": {"w": tensor, "version": 3},
        "by_number": {"__mapping__": [[0, tensor]]},
        "empty": {},
        "best": 0.5,
    }
    found = modules_of(manifest_with(attributes))
    assert found == {"model": {"w": "model/w"}, "odd": {"__tensor__": "model/w", "w": "model/w"}}
    assert modules_of(manifest_with({})) == {}
