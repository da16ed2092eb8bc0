"""Checkpoints on real storages, written by real processes that are killed, and through real outages."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from processes import process_context, snapshot_of, write_for_ever
from servers import AwsServer
from waiting import soon

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.errors import ObjectMissingError
from edl_hvd.events import CheckpointFailed, CheckpointWritten, Event
from edl_hvd.storage import Storage, open_storage

KILLS = 20
KEEP = 2


def assert_is_step(found: Snapshot | None, step: int) -> None:
    expected = snapshot_of(step)
    assert found is not None
    assert (found.step, found.epoch, found.samples, found.plain) == (step, step // 100, 32 * step, {"step": step})
    assert list(found.tensors) == list(expected.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


def nothing_reported(event: Event) -> None:
    raise AssertionError(event)


@pytest.fixture(params=["file", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def environment(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    if kind == "file":
        return {}
    server: AwsServer = request.getfixturevalue("aws")
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return server.environment


@pytest.fixture
def storage(
    kind: str, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Storage]:
    url = str(tmp_path) if kind == "file" else f"s3://{request.getfixturevalue('aws').new_bucket()}/run"
    storage = open_storage(url)
    yield storage
    storage.close()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_ranks_that_write_at_once_make_one_checkpoint(storage: Storage, size: int) -> None:
    writers = [CheckpointWriter(storage, keep=KEEP) for _ in range(size)]
    for step in (10, 20, 30):
        attempt = uuid.uuid4().hex
        for rank, writer in enumerate(writers):
            writer.begin(snapshot_of(step), rank, size, attempt)
        assert all(writer.wait(120) for writer in writers)
        events = [writer.poll() for writer in writers]
        assert [type(event) for event in events[0]] == [CheckpointWritten]
        assert events[1:] == [[]] * (size - 1)
        assert_is_step(restore_newest(storage, nothing_reported), step)
    assert steps(storage) == [30, 20]
    assert len(storage.list()) == KEEP * (size + 1), "shards and manifests of two checkpoints and nothing else"


def _wait_for_a_newer_one(storage: Storage, than: int, processes: Sequence[BaseProcess]) -> None:
    pause = threading.Event()
    while max(steps(storage), default=0) <= than:
        assert all(process.is_alive() for process in processes), "a writer ended by itself"
        pause.wait(0.005)


def _check_what_is_listed(storage: Storage, at_least: int) -> int:
    """Every listed checkpoint restores; returns the newest."""
    listed = steps(storage)
    assert listed
    assert listed[0] >= at_least
    for step in listed:
        try:
            assert_is_step(restore(storage, step), step)
        except ObjectMissingError:
            assert step not in steps(storage), "gone although still listed"
    return listed[0]


# Which ranks share a process, and who is killed: on S3 one process holds both, as its start is costly.
CREWS: dict[str, list[list[int]]] = {"file": [[0], [1]], "s3": [[0, 1]]}


def test_whenever_writers_are_killed_what_is_listed_restores_bit_for_bit(
    kind: str, storage: Storage, environment: dict[str, str]
) -> None:
    """Twenty lives of one job, each ended by SIGKILL of one or all of its processes at a random moment."""
    seed = 20
    numbers = random.Random(seed)
    pause = threading.Event()
    context = process_context()
    newest, killed_in_the_middle = 0, 0
    for life in range(KILLS):
        attempt = f"life{life}"
        processes = [
            context.Process(
                target=write_for_ever,
                args=(storage.url, environment, ranks, newest + 1, attempt, KEEP),
                daemon=True,
            )
            for ranks in CREWS[kind]
        ]
        for process in processes:
            process.start()
        _wait_for_a_newer_one(storage, newest, processes)
        started_s, first = time.monotonic(), max(steps(storage))
        _wait_for_a_newer_one(storage, first, processes)
        one_s = (time.monotonic() - started_s) / (max(steps(storage)) - first)
        pause.wait(numbers.uniform(0, one_s))  # somewhere within the next one, however slow the machine is
        numbers.shuffle(processes)
        for number, process in enumerate(processes):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            soon(process)
            assert process.exitcode == -signal.SIGKILL
            newest = _check_what_is_listed(storage, newest)
            if number == 0 and numbers.random() < 0.5:
                pause.wait(numbers.uniform(0, 0.05))  # The survivor goes on for a while.
            process.close()
        found = {object_keys.step_of(entry.key) for entry in storage.list(object_keys.ROOT)}
        killed_in_the_middle += not found <= set(steps(storage))
    assert killed_in_the_middle >= KILLS // 4, f"only {killed_in_the_middle} kills hit a checkpoint being written"
    assert_is_step(restore_newest(storage, nothing_reported), newest)


def test_an_outage_in_the_middle_fails_the_checkpoint_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    server = AwsServer()
    server.start()
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    storage = open_storage(f"s3://{server.new_bucket()}/run")
    writers = [CheckpointWriter(storage) for _ in range(2)]

    def checkpoint(step: int, between_the_ranks: Callable[[], None] = lambda: None) -> list[Event]:
        for rank in (1, 0):
            writers[rank].begin(snapshot_of(step), rank, 2, f"a{step}")
            assert rank == 0 or writers[rank].wait(120)
            between_the_ranks() if rank == 1 else None
        assert writers[0].wait(120)
        return writers[1].poll() + writers[0].poll()

    assert [type(event) for event in checkpoint(10)] == [CheckpointWritten]
    [event] = checkpoint(20, between_the_ranks=server.stop)
    assert isinstance(event, CheckpointFailed)
    assert event.step == 20
    assert server.url in event.reason
    failed = checkpoint(30)
    assert [type(event) for event in failed] == [CheckpointFailed] * 2
    server.start()
    assert steps(storage) == [10]
    assert_is_step(restore_newest(storage, nothing_reported), 10)
    assert [type(event) for event in checkpoint(40)] == [CheckpointWritten]
    assert_is_step(restore_newest(storage, nothing_reported), 40)
    storage.close()
    server.stop()
