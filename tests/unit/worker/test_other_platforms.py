"""What differs on macOS: processors cannot be asked for, and there is a device that Horovod sums nothing on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fake_world import alone, rank_of

import edl_hvd
from edl_hvd.build.tools import processors
from edl_hvd.checkpoint import restore_newest, steps
from edl_hvd.errors import UsageError
from edl_hvd.storage import open_storage
from edl_hvd.worker import process


def test_a_checkpoint_is_written_and_restored_where_processors_cannot_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    model = torch.nn.Linear(4, 1)
    state = edl_hvd.State(model=model)

    @edl_hvd.elastic(checkpoint=tmp_path, checkpoint_every="1 steps")
    def train(state: edl_hvd.State) -> None:
        state.commit()

    with alone():
        train(state)
    storage = open_storage(str(tmp_path))
    assert steps(storage)
    snapshot = restore_newest(storage, lambda *_: pytest.fail("it is whole"))
    assert snapshot is not None
    weights = [tensor for tensor in snapshot.tensors.values() if tensor.shape == model.weight.shape]
    assert any(torch.equal(tensor, model.weight) for tensor in weights)


def test_a_build_takes_all_processors_where_it_cannot_ask_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert processors() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1


@pytest.mark.parametrize(
    ("gpus", "mps", "is_launched", "device"),
    [
        (0, True, False, "mps"),
        (0, True, True, "cpu"),
        (0, False, False, "cpu"),
        (2, True, False, "cuda:0"),
    ],
)
def test_apples_device_is_taken_where_nothing_has_to_be_summed(
    gpus: int, mps: bool, is_launched: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    with rank_of(0, 1):
        if is_launched:
            monkeypatch.setattr(process.current(), "rendezvous", object())
        assert str(edl_hvd.device()) == device


@pytest.mark.parametrize(
    ("local_rank", "visible", "host"), [(1, None, None), (2, None, "node:2"), (3, None, "node:3"), (3, "3", None)]
)
def test_a_worker_that_shares_a_gpu_is_a_host_of_its_own_to_nccl(
    local_rank: int, visible: str | None, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sees but one GPU has it to itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if visible is None else 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node")
    with alone():
        assert os.environ.get("NCCL_HOSTID") == host


@pytest.mark.parametrize(
    ("visible", "gpus_there", "cuda_build", "is_refused"),
    [("5", 4, "12.8", True), ("5", 0, "12.8", False), ("5", 4, None, False), ("", 4, "12.8", False)],
)
def test_a_gpu_that_is_not_there_is_refused_where_others_are(
    visible: str, gpus_there: int, cuda_build: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(process, "count_gpus", lambda: gpus_there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if is_refused:
        with pytest.raises(UsageError, match=r"is '5', and torch sees no such GPU, though this host has 4; list"):
            edl_hvd.device()
    else:
        assert str(edl_hvd.device()) == "cpu"
