"""``edl-hvd checkpoint`` on real storages: what it shows, verifies and refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import (
    REPOSITORY,
    SHARD,
    STEPS,
    Said,
    contents,
    flip,
    model_of,
    told_of,
    write_job,
)
from servers import AwsServer

from edl_hvd.storage import Storage, open_storage

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


def test_list_where_nothing_was_written(tmp_path: Path, use_aws: AwsServer, say: Callable[..., Said]) -> None:
    (tmp_path / "empty").mkdir()
    bucket = f"s3://{use_aws.new_bucket()}/run"
    for url, shown in ((tmp_path / "empty", (tmp_path / "empty").as_uri()), (bucket, bucket)):
        told = say("list", url)
        assert (told.code, told.out, told.err) == (0, f"no checkpoint is listed in {shown}\n", "")
        assert say("list", url, "--json").json == []


def test_list_of_a_place_that_does_not_exist_is_one_error(
    tmp_path: Path, use_aws: AwsServer, say: Callable[..., Said]
) -> None:
    (tmp_path / "file").touch()
    for url, message in (
        (tmp_path / "nothing", f"{(tmp_path / 'nothing').as_uri()}: this folder or bucket does not exist"),
        (tmp_path / "file", "this folder or bucket does not exist"),
        (f"local://{tmp_path}/nothing", "this folder or bucket does not exist"),
        ("s3://no-such-bucket-here/run", "bucket 'no-such-bucket-here' does not exist; create it or correct the URL"),
    ):
        for flags in ((), ("--json",)):
            told = say("list", url, *flags)
            assert (told.code, told.out, told.err.count("\n")) == (1, "", 1)
            assert told.err.startswith("error: cannot list ")
            assert message in told.err


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


def test_show_tells_where_the_pieces_of_a_tensor_are_and_verify_which_rows_are_damaged(
    tmp_path: Path, say: Callable[..., Said]
) -> None:
    storage = open_storage(str(tmp_path))
    write_job(storage, [20], table=torch.nn.Embedding(5000, 100))
    told = [" ".join(line.split()) for line in say("show", tmp_path).out.splitlines()]
    place = next(number for number, line in enumerate(told) if line.startswith("table/weight "))
    first, second = told[place : place + 2]
    assert first.startswith("table/weight float32 5000 × 100 2,000,000 tensors-00000-of-00002.safetensors rows 0 to ")
    assert second.startswith("tensors-00001-of-00002.safetensors rows ")
    assert second.endswith(" to 5,000")
    pieces = say("show", tmp_path, "--json").json["tensors"]["table/weight"]["pieces"]
    assert [piece["first_row"] + piece["rows"] for piece in pieces] == [pieces[1]["first_row"], 5000]
    flip(storage, SHARD)
    words = (
        f"is damaged: the checksum is not the manifest's for tensor 'table/weight' rows 0:{pieces[1]['first_row']} ("
    )
    assert f"{SHARD} in {storage.url} {words}" in say("verify", tmp_path).out


def test_metrics_are_a_column_where_there_are_any(tmp_path: Path, say: Callable[..., Said]) -> None:
    measured = {10: {"accuracy": 0.7123456, "loss": 12.0}, 30: {"accuracy": float("nan"), "[red]\x1b": -1e-9}}
    write_job(open_storage(str(tmp_path)), metrics=measured)
    header, newest, middle, oldest = say("list", tmp_path).out.splitlines()
    assert header.split()[-1] == "metrics"
    assert newest.split()[-3:] == ["accuracy=nan", "[red]?=-1e-09", "valid"]
    assert middle.split()[-2:] == ["2", "valid"]
    assert oldest.split()[-3:] == ["accuracy=0.71235", "loss=12", "valid"]
    assert [one["metrics"] for one in say("list", tmp_path, "--json").json][1:] == [{}, measured[10]]
    told = [" ".join(line.split()) for line in say("show", tmp_path, "--step", 10).out.splitlines()]
    assert "metrics accuracy=0.71235 loss=12" in told
    assert not [line for line in say("show", tmp_path, "--step", 20).out.splitlines() if line.startswith("metrics")]
    assert say("show", tmp_path, "--step", 10, "--json").json["metrics"] == measured[10]


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
    verdict, reason = told.out.splitlines()
    assert verdict == "step 20: damaged"
    assert reason.startswith(
        f"  {SHARD} in {job.url} is damaged: the checksum is not the manifest's for tensor 'model/"
    )
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
    assert "it is longer than the " in oldest["damaged"][longer]


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
        (("prune", "{run}", "--keep", "1", "--keep-every", "10min"), 2, "not numbered by '10min'"),
        (("prune", "{run}", "--keep", "1", "--keep-best", "-loss"), 2, "'-loss' does not say which"),
        (
            ("prune", "{run}", "--keep", "1", "--keep-best", "loss:min"),
            2,
            "none has the metric 'loss'; those there are: none",
        ),
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
