"""How much memory students and teachers take, as the system counts it, with fast and with slow teachers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import _CONTEXT, Fleet, fleet
from torch.utils.data import DataLoader, Dataset
from waiting import LONG_S, soon

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers

pytestmark = pytest.mark.distill

SAMPLES, SAMPLE_KB = 32, 32
# A megabyte for each micro-batch.
WINDOW_MB = 48


class Noise(Dataset[Any]):
    """Images of a given size that are made one by one, as most data sets make them."""

    def __init__(self, length: int, sample_kb: int) -> None:
        self.length, self.sample_kb = length, sample_kb

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(256, self.sample_kb, generator=torch.Generator().manual_seed(index)), index


class Slow:
    """A teacher that takes a time."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.answer_s if len(images) > 2 else 0.0)
        return images.flatten(1)[:, :100]


def resident_mb(pid: int | str = "self") -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def make_loader(source: str, port: int, count: int, workers: int, window_mb: float, sample_kb: int) -> DistillLoader:
    batches = edl_hvd.ElasticBatchSampler(SAMPLES * count, global_batch=SAMPLES, micro_batch=SAMPLES)
    inner = DataLoader(Noise(SAMPLES * count, sample_kb), batch_sampler=batches, num_workers=workers)
    return DistillLoader(inner, Teachers(source, port=port, window_mb=window_mb), send=lambda batch: batch[0])


def study(source: str, port: int, workers: int, results: Any) -> None:
    """A student's process: it tells by how much it has grown, and how full its window was."""
    torch.set_num_threads(1)
    for _ in make_loader(source, port, 6, workers, 1, SAMPLE_KB):
        pass  # what any training takes
    began_mb, largest_mb, fullest = resident_mb(), 0.0, 0
    loader = make_loader(source, port, 110, workers, WINDOW_MB, SAMPLE_KB)
    for number, _ in enumerate(loader):
        calling = loader._open.service.calling
        if number == 0:
            deadline_s = time.monotonic() + 60
            while calling.has_room and time.monotonic() < deadline_s:
                time.sleep(0.01)  # a slow step; the window fills meanwhile
        largest_mb = max(largest_mb, resident_mb())
        fullest = max(fullest, sum(entry.size_bytes for entry in calling.window.entries.values()))
    loader.close()
    results.put((largest_mb - began_mb, fullest / (1 << 20)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("answer_s", "count"), [(0.8, 12), (0.002, 12)], ids=["slow", "fast"])
def test_a_student_takes_no_more_than_the_window_and_a_tenth(tmp_path, answer_s, count, workers):
    with fleet(tmp_path, *(Slow(answer_s) for _ in range(count)), max_batch=SAMPLES) as teachers:
        results = _CONTEXT.Queue()
        student = _CONTEXT.Process(target=study, args=(teachers.source, teachers.port, workers, results))
        student.start()
        grown_mb, fullest_mb = results.get(timeout=LONG_S)
        soon(student)
    assert grown_mb <= 1.1 * WINDOW_MB, f"grown by {grown_mb:.1f} MB"
    if answer_s > 0.1 and not workers:
        assert fullest_mb > 0.6 * WINDOW_MB, "the window was never full, so nothing is shown"


def test_a_teacher_takes_no_more_than_three_batches(tmp_path):
    sample_kb, batch_mb = 512, 16.0
    teachers = Fleet(tmp_path)
    try:
        teachers.start(Slow(0.0), max_batch=SAMPLES)
        pid = teachers.processes[0].pid
        assert pid is not None
        loader = make_loader(teachers.source, teachers.port, 3, 0, 1, 1)
        for _ in loader:
            pass
        loader.close()
        began_mb, largest_mb = resident_mb(pid), 0.0
        loader = make_loader(teachers.source, teachers.port, 24, 0, 4 * batch_mb, sample_kb)
        for _ in loader:
            largest_mb = max(largest_mb, resident_mb(pid))
        loader.close()
    finally:
        teachers.close()
    assert 0.8 * batch_mb <= largest_mb - began_mb <= 3.3 * batch_mb
