"""``edl-hvd checkpoint`` on real storages: what it takes elsewhere, and what it removes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import (
    SHARD,
    Said,
    assert_same,
    contents,
    flip,
    model_of,
    nothing_reported,
    told_of,
    write_job,
)
from safetensors.torch import load_file
from servers import AwsServer

from edl_hvd.checkpoint import restore, restore_newest, steps
from edl_hvd.storage import Storage, open_storage

# restore


def test_restore_makes_a_folder_that_a_job_can_be_given(job: Storage, tmp_path: Path, say: Callable[..., Said]) -> None:
    told = say("restore", job.url, "--to", tmp_path / "copy", "--step", 20)
    assert (told.code, told.err) == (0, "")
    copy = open_storage(str(tmp_path / "copy"))
    assert told.out == f"step 20 is in {copy.url}\n"
    assert contents(copy) == contents(job, 20)
    assert_same(restore_newest(copy, nothing_reported), restore(job, 20))
    newest = say("restore", job.url, "--to", tmp_path / "newest", "--json").json
    assert newest == {"step": 30, "url": (tmp_path / "newest").as_uri()}


def test_restore_overwrites_nothing_and_leaves_nothing_half_done(
    local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    before = contents(local)
    for folder in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt", tmp_path / "run"):
        told = say("restore", local.url, "--to", folder)
        assert told.code == 1
        assert told.err == f"error: cannot restore to {folder}: it is not an empty folder; name a new one\n"
    assert contents(local) == before
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    flip(local, SHARD)
    told = say("restore", local.url, "--to", tmp_path / "new", "--step", 20)
    assert told.code == 1
    assert SHARD in told.err
    assert contents(open_storage(str(tmp_path / "new"))) == {}
    assert say("restore", local.url, "--to", tmp_path / "new").code == 0, "the folder can be used again"


# export

READ_ELSEWHERE = """
import hashlib, json, sys
sys.modules["edl_hvd"] = None
import torch
from safetensors.torch import load_file
def told(tensors):
    data = lambda one: hashlib.sha256(one.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return {name: [str(one.dtype), list(one.shape), data(one)] for name, one in tensors.items()}
print(json.dumps([told(torch.load(sys.argv[1], weights_only=True)), told(load_file(sys.argv[2])),
                  told(torch.load(sys.argv[1], weights_only=True, mmap=True))]))
"""


def test_what_is_exported_is_read_without_this_package_bit_for_bit(
    job: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    told = say("export", job.url, tmp_path / "model.pt")
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith(f"{tmp_path / 'model.pt'}: 9 tensors of 'model', step 30, ")
    made = say("export", job.url, tmp_path / "model.safetensors", "--json").json
    assert (made["step"], made["attribute"], made["tensors"]) == (30, "model", 9)
    read = subprocess.run(
        [sys.executable, "-I", "-c", READ_ELSEWHERE, tmp_path / "model.pt", tmp_path / "model.safetensors"],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    expected = told_of(model_of(30).state_dict())
    as_torch, as_safetensors, mapped = json.loads(read.stdout)
    assert as_torch == expected
    assert list(as_torch) == list(expected)
    assert as_safetensors == expected
    assert mapped == expected
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "nothing else was left there"


def test_tensors_in_pieces_are_copied_and_exported_whole(tmp_path: Path, say: Callable[..., Said]) -> None:
    storage = open_storage(str(tmp_path / "run"))
    layers = {"large": torch.nn.Embedding(9000, 100), "small": torch.nn.Linear(3, 3), "wide": torch.nn.Linear(600, 900)}
    model = torch.nn.ModuleDict(layers).half()
    write_job(storage, [20], average=model)
    pieces = say("show", storage.url, "--json").json["tensors"]["average/large.weight"]["pieces"]
    assert len(pieces) == 2
    for name in ("model.pt", "model.safetensors"):
        assert say("export", storage.url, tmp_path / name, "--prefix", "average").code == 0
    assert told_of(torch.load(tmp_path / "model.pt", weights_only=True)) == told_of(model.state_dict())
    assert told_of(load_file(tmp_path / "model.safetensors")) == told_of(model.state_dict())
    assert say("copy", storage.url, tmp_path / "copy").code == 0
    assert_same(restore_newest(open_storage(str(tmp_path / "copy")), nothing_reported), restore(storage, 20))


def test_export_of_another_step_and_of_one_of_several_modules(tmp_path: Path, say: Callable[..., Said]) -> None:
    storage = open_storage(str(tmp_path / "run"))
    write_job(storage, [10, 20], average=model_of(7))
    told = say("export", storage.url, tmp_path / "a.pt")
    assert told.code == 2
    assert "2 attributes that are a module's state_dict (average, model); name one with --prefix" in told.err
    assert say("export", storage.url, tmp_path / "a.pt", "--prefix", "average").code == 0
    assert told_of(torch.load(tmp_path / "a.pt", weights_only=True)) == told_of(model_of(7).state_dict())
    assert say("export", storage.url, tmp_path / "b.pt", "--prefix", "model", "--step", 10).code == 0
    assert told_of(torch.load(tmp_path / "b.pt", weights_only=True)) == told_of(model_of(10).state_dict())
    told = say("export", storage.url, tmp_path / "c.pt", "--prefix", "optimizer")
    assert told.code == 2
    assert "no attribute 'optimizer' that is a module's state_dict; there are: average, model" in told.err
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "run"]


def test_export_overwrites_nothing_and_writes_nothing_damaged(
    local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    (tmp_path / "model.pt").write_text("mine")
    told = say("export", local.url, tmp_path / "model.pt")
    assert (told.code, told.err) == (
        1,
        f"error: cannot export to {tmp_path / 'model.pt'}: it exists and was left as it is\n",
    )
    assert (tmp_path / "model.pt").read_text() == "mine"
    for number in range(2):
        flip(local, f"checkpoints/000000000030/tensors-0000{number}-of-00002.safetensors")
    told = say("export", local.url, tmp_path / "other.pt")
    assert told.code == 1
    assert "the checksum is not the manifest's for tensor 'model/" in told.err
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "run"]


# copy


@pytest.mark.parametrize("kind", ["file", "s3", "memory", "fsspec"])
def test_copy_to_any_storage_and_back(
    kind: str, job: Storage, tmp_path: Path, use_aws: AwsServer, say: Callable[..., Said]
) -> None:
    goal = {
        "file": str(tmp_path / "copy"),
        "s3": f"s3://{use_aws.new_bucket()}/copy",
        "memory": f"memory://{tmp_path.name}-{job.url[:2]}",
        "fsspec": f"local://{tmp_path}/copy",
    }[kind]
    told = say("copy", job.url, goal, "--step", 20)
    assert (told.code, told.out, told.err) == (0, "step 20: copied\n", "")
    told = say("copy", job.url, goal, "--all")
    assert (told.code, told.out) == (0, "step 10: copied\nstep 20: was there already\nstep 30: copied\n")
    assert contents(open_storage(goal)) == contents(job)
    again = say("copy", goal, tmp_path / "back", "--json")
    assert again.json == [{"step": 30, "was_there": False, "problem": ""}]
    back = open_storage(str(tmp_path / "back"))
    assert contents(back) == contents(job, 30)
    assert_same(restore_newest(back, nothing_reported), restore(job, 30))


def test_copy_replaces_no_other_checkpoint_and_no_other_file(
    local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    other = open_storage(str(tmp_path / "other"))
    write_job(other, [20], variant=1)
    other.write("checkpoints/000000000010/tensors-00000-of-00002.safetensors", b"of another attempt")
    before = contents(other)
    told = say("copy", local.url, other.url, "--all")
    assert told.code == 1
    assert told.out == "step 30: copied\n"
    first, second = told.err.splitlines()
    assert first.startswith("step 10: not copied: cannot copy to checkpoints/000000000010/tensors-00000-of-00002.safe")
    assert second.startswith(f"step 20: not copied: {other.url} has a different checkpoint of step 20")
    after = contents(other)
    assert {key: after[key] for key in before} == before
    assert steps(other) == [30, 20]


def test_a_copy_that_was_broken_off_is_not_listed_and_goes_on(
    local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    goal = open_storage(str(tmp_path / "goal"))
    goal.write(SHARD, local.read(SHARD))
    assert say("list", goal.url, "--json").json == []
    assert say("copy", local.url, goal.url, "--step", 20).code == 0
    assert contents(goal) == contents(local, 20)


def test_a_damaged_checkpoint_is_not_copied_and_the_others_are(
    local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    flip(local, SHARD)
    told = say("copy", local.url, tmp_path / "goal", "--all")
    assert told.code == 1
    assert SHARD in told.err
    assert steps(open_storage(str(tmp_path / "goal"))) == [30, 10]


# prune


def test_prune_says_what_it_would_remove_and_then_removes_just_that(job: Storage, say: Callable[..., Said]) -> None:
    job.write("checkpoints/000000000015/tensors-00000-of-00002.safetensors", b"of a dead attempt")
    job.write("notes.txt", b"a stranger's")
    before = contents(job)
    told = say("prune", job.url, "--keep", 1, "--dry-run")
    assert (told.code, told.err) == (0, "")
    kept, would = told.out.splitlines()
    assert kept == "kept: step 30"
    assert would.startswith("would be removed: step 20, 10 (7 objects, ")
    assert contents(job) == before
    plan = say("prune", job.url, "--keep", 1, "--dry-run", "--json").json
    assert (plan["kept"], plan["removed"], plan["dry_run"]) == ([30], [20, 10], True)
    assert say("prune", job.url, "--keep", 1).code == 0
    assert contents(job) == {key: before[key] for key in before.keys() - set(plan["keys"])}
    assert say("verify", job.url, "--all").code == 0
    assert say("prune", job.url, "--keep", 1).out == "kept: step 30\nremoved: nothing\n"


@pytest.mark.parametrize("where", ["file", "s3"])
def test_prune_leaves_milestones_and_the_best_where_it_is_told_to(
    where: str, use_aws: AwsServer, tmp_path: Path, say: Callable[..., Said]
) -> None:
    storage = open_storage(str(tmp_path) if where == "file" else f"s3://{use_aws.new_bucket()}/run")
    accuracies = {10: 0.5, 20: 0.9, 30: 0.6, 40: 0.7, 50: 0.8}
    write_job(storage, list(accuracies), metrics={step: {"accuracy": value} for step, value in accuracies.items()})
    words = ("prune", storage.url, "--keep", 1, "--keep-every", "3 epochs", "--keep-best", "accuracy:max")
    plan = say(*words, "--dry-run", "--json").json
    assert (plan["kept"], plan["milestones"], plan["best"], plan["removed"]) == ([50], [30], 20, [40, 10])
    kept, milestones, best, removed = say(*words).out.splitlines()
    assert (kept, milestones, best) == ("kept: step 50", "milestones, kept: step 30", "best, kept: step 20")
    assert removed.startswith("removed: step 40, 10 (6 objects, ")
    assert steps(storage) == [50, 30, 20]
    assert say("verify", storage.url, "--all").code == 0
    *_, removed = say("prune", storage.url, "--keep", 1, "--keep-every", "960 samples").out.splitlines()
    assert removed.startswith("removed: step 20 (")
    assert say("prune", storage.url, "--keep", 1).code == 0
    assert steps(storage) == [50]


def test_prune_counts_only_what_is_valid_and_stops_where_nothing_is(local: Storage, say: Callable[..., Said]) -> None:
    local.delete(SHARD)
    told = say("prune", local.url, "--keep", 2)
    assert told.out == "kept: step 30, 10\nnot valid, left alone: step 20\nremoved: nothing\n"
    flip(local, "checkpoints/000000000010/manifest.json", 200)
    flip(local, "checkpoints/000000000030/manifest.json", 200)
    before = contents(local)
    told = say("prune", local.url, "--keep", 1)
    assert told.code == 1
    assert "none of the 3 checkpoints" in told.err
    assert contents(local) == before
