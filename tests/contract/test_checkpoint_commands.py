"""``edl-hvd checkpoint`` on real storages: what it shows, takes elsewhere, removes and refuses."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import AwsServer

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, layout, restore, restore_newest, steps
from edl_hvd.cli.main import main
from edl_hvd.storage import Storage, open_storage
from edl_hvd.worker.memory import Memory

STEPS = [30, 20, 10]
REPOSITORY = Path(__file__).resolve().parents[2]
SHARD = "checkpoints/000000000020/tensors-00000-of-00002.safetensors"
MANIFEST = "checkpoints/000000000020/manifest.json"


@dataclass(frozen=True)
class Said:
    """What a command wrote and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs ``edl-hvd checkpoint`` with these words."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["edl-hvd", "checkpoint", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return run


def model_of(step: int) -> torch.nn.Module:
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2).bfloat16())
    with torch.no_grad():
        model[1].running_mean.fill_(float(step))
    return model


def write_job(storage: Storage, chosen: list[int] = STEPS, variant: int = 0, **more: Any) -> None:
    """Checkpoints of a small training by two workers, the newest last."""
    for step in sorted(chosen):
        model = model_of(step + variant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        memory = Memory({"model": model, "optimizer": optimizer, "best": 0.5, "words": ["a", "b"], **more})
        memory.step, memory.epoch, memory.samples = step, step // 10, step * 32
        memory.take(step)
        writers = [CheckpointWriter(storage, keep=5) for _ in range(2)]
        for rank, writer in enumerate(writers):
            writer.begin(memory.for_checkpoint(), rank, 2, f"attempt-{step}-{variant}")
        assert all(writer.wait(120) for writer in writers)
        assert step in steps(storage)


def contents(storage: Storage, step: int | None = None) -> dict[str, bytes]:
    prefix = "" if step is None else layout.folder(step)
    return {entry.key: storage.read(entry.key) for entry in storage.list(prefix)}


def flip(storage: Storage, key: str, place: int = -1) -> None:
    data = bytearray(storage.read(key))
    data[place] ^= 1
    storage.write(key, bytes(data))


def nothing_reported(event: object) -> None:
    raise AssertionError(event)


def assert_same(found: Snapshot | None, expected: Snapshot) -> None:
    assert found is not None
    assert (found.step, found.epoch, found.samples, found.plain) == (
        expected.step,
        expected.epoch,
        expected.samples,
        expected.plain,
    )
    assert list(found.tensors) == list(expected.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.fixture
def use_aws(aws: AwsServer, monkeypatch: pytest.MonkeyPatch) -> AwsServer:
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    return aws


@pytest.fixture(params=["file", "s3"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """The storage of a job with three checkpoints."""
    if request.param == "s3":
        storage = open_storage(f"s3://{request.getfixturevalue('use_aws').new_bucket()}/run")
    else:
        storage = open_storage(str(tmp_path / "run"))
    write_job(storage)
    return storage


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    """The same in a folder."""
    storage = open_storage(str(tmp_path / "run"))
    write_job(storage)
    return storage


# list and show


def test_list_tells_of_every_checkpoint_the_newest_first(job: Storage, say: Callable[..., Said]) -> None:
    told = say("list", job.url)
    assert (told.code, told.err) == (0, "")
    rows = [line.split() for line in told.out.splitlines()]
    assert [row[0] for row in rows] == ["step", "30", "20", "10"]
    assert rows[1][1:3] == ["3", "960"]
    assert all(row[-2:] == ["2", "valid"] for row in rows[1:])
    listed = say("list", job.url, "--json").json
    assert [(one["step"], one["epoch"], one["samples"], one["world_size"], one["valid"]) for one in listed] == [
        (step, step // 10, step * 32, 2, True) for step in STEPS
    ]
    sizes = {step: sum(len(data) for key, data in contents(job, step).items() if "tensors" in key) for step in STEPS}
    assert {one["step"]: one["size_bytes"] for one in listed} == sizes


def test_list_says_why_one_is_not_readable(job: Storage, say: Callable[..., Said]) -> None:
    job.write(SHARD, job.read(SHARD)[:-1])
    flip(job, "checkpoints/000000000010/manifest.json", 200)
    told = say("list", job.url)
    assert told.code == 1
    newest, middle, oldest = told.out.splitlines()[1:]
    assert newest.endswith("valid")
    assert "not readable" in middle
    assert f"{SHARD} has" in middle
    assert "not readable" in oldest
    assert "000000000010/manifest.json" in oldest
    assert [one["valid"] for one in say("list", job.url, "--json").json] == [True, False, False]


def test_list_where_nothing_was_written(tmp_path: Path, say: Callable[..., Said]) -> None:
    told = say("list", tmp_path / "nothing")
    assert (told.code, told.out) == (0, f"no checkpoint is listed in {(tmp_path / 'nothing').as_uri()}\n")
    assert say("list", tmp_path / "nothing", "--json").json == []


def test_show_tells_what_is_in_a_checkpoint(job: Storage, say: Callable[..., Said]) -> None:
    told = say("show", job.url)
    assert (told.code, told.err) == (0, "")
    lines = [" ".join(line.split()) for line in told.out.splitlines()]
    assert f"checkpoint step 30 in {job.url}" in lines
    assert "progress epoch 3, 960 samples" in lines
    assert "counters/step 30" in lines
    assert "attributes/model 9 entries, 9 tensors" in lines
    assert "attributes/best 0.5" in lines
    [weight] = [line for line in lines if line.startswith("model/0.weight ")]
    assert weight.startswith("model/0.weight float32 30 × 40 4,800 tensors-0000")
    assert any(line.startswith("model/2.bias bfloat16 2 4 ") for line in lines)
    assert f"torch {torch.__version__}" in told.out
    shown = say("show", job.url, "--step", 20, "--json").json
    assert (shown["url"], shown["step"], shown["world_size"]) == (job.url, 20, 2)
    assert shown["tensors"]["model/0.weight"]["shape"] == [30, 40]
    assert shown["plain"]["attributes"]["words"] == ["a", "b"]


def test_what_a_manifest_says_does_not_move_the_cursor(tmp_path: Path, say: Callable[..., Said]) -> None:
    write_job(open_storage(str(tmp_path)), [10], note="\x1b[2J[red]", **{"a\nb": 1})
    told = say("show", tmp_path).out
    assert "\x1b" not in told
    assert "[red]" in told
    assert "attributes/a b" in told


# verify


def test_verify_reads_every_byte_and_names_what_is_damaged(job: Storage, say: Callable[..., Said]) -> None:
    told = say("verify", job.url, "--all")
    assert (told.code, told.err) == (0, "")
    assert [line.split(",")[0] for line in told.out.splitlines()] == [f"step {step}: valid" for step in STEPS]
    flip(job, SHARD)
    assert say("list", job.url).code == 0, "the length is right, so only verify sees it"
    assert say("verify", job.url).code == 0, "the newest is whole"
    told = say("verify", job.url, "--step", 20)
    assert told.code == 1
    assert told.out.splitlines() == [
        "step 20: damaged",
        f"  {SHARD} in {job.url} is damaged: its checksum is not the manifest's",
    ]
    found = say("verify", job.url, "--all", "--json")
    assert found.code == 1
    assert [(one["step"], one["valid"], list(one["damaged"])) for one in found.json] == [
        (30, True, []),
        (20, False, [SHARD]),
        (10, True, []),
    ]


def test_verify_names_each_damaged_file_and_a_damaged_manifest(local: Storage, say: Callable[..., Said]) -> None:
    local.delete(SHARD)
    flip(local, SHARD.replace("00000-of", "00001-of"), 100)
    flip(local, "checkpoints/000000000030/manifest.json", 200)
    longer = SHARD.replace("020", "010")
    local.write(longer, local.read(longer) + b"more")
    newest, middle, oldest = say("verify", local.url, "--all", "--json").json
    assert list(newest["damaged"]) == ["checkpoints/000000000030/manifest.json"]
    assert sorted(middle["damaged"]) == [SHARD, SHARD.replace("00000-of", "00001-of")]
    assert "is missing" in middle["damaged"][SHARD]
    assert "longer than listed" in oldest["damaged"][longer]


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


def told_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        name: [
            str(one.dtype),
            list(one.shape),
            hashlib.sha256(one.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, one in tensors.items()
    }


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
    assert "its checksum is not the manifest's" in told.err
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


# Refusals, and where things are written


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("show", "{run}", "--step", "25"), 1, "no checkpoint of step 25 is listed"),
        (("verify", "{run}", "--step", "25"), 1, "those there are: 30, 20, 10"),
        (("restore", "{run}", "--to", "{new}", "--step", "25"), 1, "no checkpoint of step 25"),
        (("export", "{run}", "{new}.pt", "--step", "25"), 1, "no checkpoint of step 25"),
        (("copy", "{run}", "{new}", "--step", "25"), 1, "no checkpoint of step 25"),
        (("show", "{new}"), 1, "no checkpoint is listed"),
        (("verify", "{new}", "--all"), 1, "no checkpoint is listed"),
        (("prune", "{new}", "--keep", "1"), 1, "no checkpoint is listed"),
        (("copy", "{new}", "{run}", "--all"), 1, "no checkpoint is listed"),
        (("export", "{run}", "{new}/deeper/model.pt"), 1, "No such file or directory"),
        (("export", "{run}", "{new}.onnx"), 2, "ends in .safetensors or .pt"),
        (("restore", "{run}", "--to", "s3://bucket/run"), 2, "expected a local folder"),
        (("list", "nosuch://place"), 2, "no installed package handles 'nosuch'"),
        (("copy", "{run}", "memory://"), 2, "expected 'memory://name'"),
    ],
)
def test_a_refusal_is_one_line_and_changes_nothing(
    words: tuple[str, ...], code: int, message: str, local: Storage, tmp_path: Path, say: Callable[..., Said]
) -> None:
    before = contents(local)
    told = say(*(word.format(run=tmp_path / "run", new=tmp_path / "new") for word in words))
    assert told.code == code
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1
    assert "Traceback" not in told.err
    assert contents(local) == before
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "x", "--step", "1", "--all"),
        ("copy", "x", "y", "--step", "1", "--all"),
        ("show", "x", "--step", "-1"),
        ("prune", "x", "--keep", "0"),
        ("prune", "x"),
        ("restore", "x"),
        ("export", "x"),
        ("polish", "x"),
    ],
)
def test_wrong_usage_ends_with_exit_code_2(words: tuple[str, ...], say: Callable[..., Said]) -> None:
    told = say(*words)
    assert told.code == 2
    assert "Usage:" in told.err


WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "safetensors", "horovod"):
    sys.modules[name] = None
from edl_hvd.cli.main import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["edl-hvd", "checkpoint", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(line.split()[0], ended.code or 0)
"""


def test_every_command_works_where_torch_is_not_installed(local: Storage, tmp_path: Path) -> None:
    lines = ["list run", "show run", "verify run --all", "restore run --to restored", "export run model.pt",
             "export run model.safetensors", "copy run copied --all", "prune run --keep 1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    assert done.stderr == ""
    ends = [line for line in done.stdout.splitlines() if line in {f"{words.split()[0]} 0" for words in lines}]
    assert ends == [f"{words.split()[0]} 0" for words in lines]
    assert told_of(torch.load(tmp_path / "model.pt", weights_only=True)) == told_of(model_of(30).state_dict())


def test_without_xxhash_one_line_says_what_to_install(local: Storage, tmp_path: Path) -> None:
    text = WITHOUT_TORCH.replace('"torch"', '"xxhash"')
    done = subprocess.run([sys.executable, "-c", text], input="list run", text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True)  # fmt: skip
    assert done.stdout == "list 2\n"
    assert done.stderr == "error: checkpoints need xxhash, which is not installed; run: pip install xxhash\n"


def test_a_progress_bar_is_shown_on_a_terminal_only_and_only_on_standard_error(local: Storage, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "edl_hvd.cli.main", "checkpoint", "verify", "run", "--all", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, env=environment, check=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65_536):
            shown += piece
    except OSError:
        pass  # Nobody has the other side any more.
    finally:
        os.close(ours)
    assert b"Reading" in shown
    assert [one["step"] for one in json.loads(done.stdout)] == STEPS
