"""What the suites of ``edl-hvd checkpoint`` share: a job's checkpoints on a real storage, and running a command."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from servers import AwsServer

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.cli.main import main
from edl_hvd.storage import Storage, open_storage
from edl_hvd.worker.commits.state_store import StateStore

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


def write_job(
    storage: Storage,
    chosen: list[int] = STEPS,
    variant: int = 0,
    metrics: Mapping[int, dict[str, float]] = MappingProxyType({}),
    **more: Any,
) -> None:
    """Checkpoints of a small training by two workers, the newest last; ``metrics`` by step."""
    for step in sorted(chosen):
        model = model_of(step + variant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        store = StateStore({"model": model, "optimizer": optimizer, "best": 0.5, "words": ["a", "b"], **more})
        store.step, store.epoch, store.samples = step, step // 10, step * 32
        store.save(step)
        writers = [CheckpointWriter(storage, keep=5) for _ in range(2)]
        for rank, writer in enumerate(writers):
            snapshot = replace(store.snapshot(), metrics=metrics.get(step, {}))
            writer.begin(snapshot, rank, 2, f"attempt-{step}-{variant}")
        assert all(writer.wait(120) for writer in writers)
        assert step in steps(storage)


def contents(storage: Storage, step: int | None = None) -> dict[str, bytes]:
    prefix = "" if step is None else object_keys.folder(step)
    return {entry.key: storage.read(entry.key) for entry in storage.list(prefix)}


def flip(storage: Storage, key: str, place: int = -1) -> None:
    data = bytearray(storage.read(key))
    data[place] ^= 1
    storage.write(key, bytes(data))


def told_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        name: [
            str(one.dtype),
            list(one.shape),
            hashlib.sha256(one.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, one in tensors.items()
    }


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
