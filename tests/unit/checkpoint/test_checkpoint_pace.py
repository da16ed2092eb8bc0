"""How much of the processors a checkpoint takes beside the training."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from clocks import FakeClock
from waiting import soon

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore
from edl_hvd.checkpoint.writing.throttle import CpuThrottle
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.events import CheckpointWritten, EventLog
from edl_hvd.settings import Settings
from edl_hvd.storage import open_storage
from edl_hvd.worker.saving.manager import CheckpointManager


def work(milliseconds: float) -> None:
    """Keep a processor busy for some seconds, by its own account."""
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < milliseconds / 1000:
        pass


def busy(cpu: CpuThrottle, turns: int, milliseconds: float) -> None:
    for _ in range(turns):
        cpu.throttle()
        work(milliseconds)
    cpu.throttle()


@pytest.mark.parametrize("threads", [1, 4])
def test_all_threads_together_keep_to_the_share(threads):
    cpu = CpuThrottle(0.2, 1000.0, SYSTEM_CLOCK)
    begun_s = time.monotonic()
    writers = [threading.Thread(target=busy, args=(cpu, 20 // threads, 5.0)) for _ in range(threads)]
    for writer in writers:
        writer.start()
    for writer in writers:
        soon(writer)
    # 20 turns of 5 ms in a fifth of a processor.
    assert time.monotonic() - begun_s >= 0.1 / 0.2 * 0.9
    assert 0 < cpu.held_s <= time.monotonic() - begun_s


def test_who_is_waited_for_is_held_back_no_more():
    cpu = CpuThrottle(1e-6, 1000.0, SYSTEM_CLOCK)
    writer = threading.Thread(target=busy, args=(cpu, 3, 5.0))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    cpu.expedite()
    writer.join(60)
    assert not writer.is_alive()


def test_after_the_longest_time_nobody_is_held_back():
    clock = FakeClock()
    cpu = CpuThrottle(1e-6, 10.0, clock)
    clock.sleep(10.0)
    busy(cpu, 100, 0.1)
    assert cpu.held_s == 0.0


@pytest.mark.parametrize("cpu", [CpuThrottle(None, 1000.0, SYSTEM_CLOCK), CpuThrottle(1e-9, 0.0, SYSTEM_CLOCK)])
def test_without_a_limit_or_time_nobody_is_held_back(cpu):
    busy(cpu, 100, 0.1)
    assert cpu.held_s == 0.0


def test_what_was_not_used_is_not_saved_up():
    clock = FakeClock()
    cpu = CpuThrottle(0.5, 1000.0, clock)
    clock.sleep(100.0)
    begun_s = time.monotonic()
    work(20)
    cpu.throttle()
    assert time.monotonic() - begun_s >= 0.035, "20 ms of work are 40 ms of a half"


# --- in use ---


def test_a_checkpoint_is_held_back_until_somebody_waits_for_it(tmp_path):
    storage = open_storage(str(tmp_path))
    writer = CheckpointWriter(storage)
    tensors = {str(number): torch.full((1_000_000,), float(number)) for number in range(16)}
    writer.begin(Snapshot(tensors, step=1), 0, 1, "first", cpu=CpuThrottle(1e-6, 1000.0, SYSTEM_CLOCK))
    time.sleep(0.5)  # all of it takes 0.1 s on a slow machine, and an hour at this pace
    assert writer.busy
    assert writer.wait(60)
    [written] = writer.poll()
    assert isinstance(written, CheckpointWritten)
    assert 0 < written.held_s < written.duration_s
    assert torch.equal(restore(storage, 1).tensors["7"], tensors["7"])


def test_one_that_is_given_up_is_held_back_no_more(tmp_path):
    writer = CheckpointWriter(open_storage(str(tmp_path)))
    tensors = {str(number): torch.zeros(1_000_000) for number in range(16)}
    writer.begin(Snapshot(tensors, step=1), 0, 1, "first", cpu=CpuThrottle(1e-6, 1000.0, SYSTEM_CLOCK))
    time.sleep(0.1)
    begun_s = time.monotonic()
    writer.close()
    assert time.monotonic() - begun_s < 60
    assert writer.poll() == []


@pytest.mark.parametrize(("held_s", "fits"), [(0.0, False), (95.0, True)])
def test_whether_a_last_checkpoint_fits_is_judged_by_the_speed_without_holding_back(
    tmp_path, monkeypatch, held_s, fits
):
    checkpoints = CheckpointManager(Settings(checkpoint=str(tmp_path)), EventLog(None))
    written = CheckpointWritten(checkpoints.url, 1, size_bytes=1_000_000, duration_s=100.0, held_s=held_s)
    monkeypatch.setattr(checkpoints._writer, "poll", lambda: [written])
    checkpoints.report()
    monkeypatch.setattr(checkpoints._writer, "poll", list)
    begun = []
    monkeypatch.setattr(checkpoints, "begin", lambda *arguments, **named: begun.append(arguments))
    store = SimpleNamespace(size_bytes=1_000_000, step=2, snapshot=lambda: Snapshot({}))
    checkpoints.write_emergency(store, remaining_s=10.0)
    assert bool(begun) == fits
