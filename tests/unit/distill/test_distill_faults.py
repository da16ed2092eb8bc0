"""Real students and teachers, and faults drawn at random: each place once, in order, with the right bits.

python tests/unit/distill/test_distill_faults.py 100        100 runs, with the seeds from 0 on
python tests/unit/distill/test_distill_faults.py 1 17       the run with seed 17
"""

from __future__ import annotations

import random
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "support"))

import pytest
import torch
from fleet import Fleet, Images, Sums, sums
from torch.utils.data import DataLoader
from waiting import soon, until

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.calling import Calling

pytestmark = pytest.mark.distill

LENGTH = 600


class Faulty(Sums):
    """A teacher that now and then takes long, or answers what is none; with luck, an answer is right.

    Args:
        delay_s: Time of an answer.
        stalls: Share of answers that take 40 times as long.
        lies: Share of answers that hold NaN, or have another shape.
        seed: Seed of the chance.
    """

    def __init__(self, delay_s: float, stalls: float = 0.0, lies: float = 0.0, seed: int = 0) -> None:
        super().__init__(delay_s)
        self.stalls, self.lies, self.seed = stalls, lies, seed
        self.chance = random.Random(seed)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        answer = super().__call__(images)
        if len(images) <= 2:
            return answer  # the probe
        if self.chance.random() < self.stalls:
            time.sleep(40 * self.delay_s)
        if self.chance.random() < self.lies:
            if self.chance.random() < 0.5:
                return answer[:, :2]
            answer[0, 0] = float("nan")
        return answer


class Strikes:
    """What befalls a fleet, in a thread, until ``close``; in the end two teachers are well."""

    def __init__(self, teachers: Fleet, loader: DistillLoader, count: int, chance: random.Random) -> None:
        self.teachers, self.loader, self.count, self.chance = teachers, loader, count, chance
        self.done: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        soon(self._thread)

    def _run(self) -> None:
        for _ in range(self.chance.randint(3, 10)):
            if self._is_over.wait(self.chance.uniform(0.0, 0.3)):
                return
            what = self.chance.choice(["kill", "stop", "cut", "leave", "start"])
            self.done.append(what)
            getattr(self, what)(self.chance.randrange(self.count))
        for number in range(2):
            self.kill(number)
            self.teachers.start(Sums(0.005), number)

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.teachers.signal(number, signal.SIGKILL)
        soon(self.teachers.processes[number])

    def stop(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.teachers.signal(number, signal.SIGSTOP)
        if self.chance.random() < 0.5:
            self._is_over.wait(self.chance.uniform(0.0, 0.5))
            with suppress(ProcessLookupError):
                self.teachers.signal(number, signal.SIGCONT)

    def leave(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.teachers.signal(number, signal.SIGCONT)
            self.teachers.signal(number, signal.SIGTERM)

    def start(self, number: int) -> None:
        self.kill(number)
        self.teachers.start(self.model(), number)

    def cut(self, number: int) -> None:
        """End a connection in the middle of whatever it says."""
        service = self.loader._open.service
        calling = service.calling if service else None
        for call in list(calling._calls.values()) if isinstance(calling, Calling) else []:
            if call.address.port == self.teachers.port + number:
                with suppress(OSError):
                    call.stream.connection.shutdown(socket.SHUT_RDWR)

    def model(self) -> Sums:
        delay_s = self.chance.choice([0.002, 0.01, 0.05])
        faults = self.chance.choice([(0.0, 0.0), (0.05, 0.0), (0.0, 0.1)])
        return Faulty(delay_s, *faults, seed=self.chance.randrange(1 << 30))


def run_at_random(seed: int, folder: Path) -> list[str]:
    """An epoch with faults, to its end. Returns what happened."""
    chance = random.Random(seed)
    teachers = Fleet(folder)
    count = chance.randint(2, 5)
    before = set(threading.enumerate())
    batches = edl_hvd.ElasticBatchSampler(LENGTH, global_batch=8, micro_batch=4, seed=seed)
    expected = [list(indices) for indices in batches]
    inner = DataLoader(
        Images(LENGTH, chance.choice([4, 64])), batch_sampler=batches, num_workers=chance.choice([0, 0, 1])
    )
    try:
        for number in range(count):
            teachers.start(Faulty(0.005, seed=number))
        wanted = Teachers(teachers.source, port=teachers.port, window_mb=chance.choice([1, 16]))
        loader = DistillLoader(inner, wanted, send=lambda batch: batch[0])
        strikes = Strikes(teachers, loader, count, chance)
        cuts = sorted(chance.sample(range(2, len(expected)), chance.randint(0, 2)))
        step_s = chance.choice([0.0, 0.01, 0.03])
        for end in (*cuts, None):  # passes that are left early, as after a broken world, and one to the end
            seen = []
            for images, index, answer in loader:
                assert torch.equal(answer, sums(images)), f"seed {seed}: a wrong answer"
                seen.append(index.tolist())
                time.sleep(step_s)
                if len(seen) == end:
                    break
            assert seen == expected[:end], f"seed {seed}: not each place once, in order"
        strikes.close()
        loader.close()
    finally:
        teachers.close()
    until(lambda: {one for one in threading.enumerate() if "QueueFeeder" not in one.name} <= before)
    return strikes.done


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_cost_no_answer(tmp_path, seed):
    torch.set_num_threads(1)
    assert run_at_random(seed, tmp_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + int(sys.argv[1])):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            done = run_at_random(seed, Path(folder))
        print(f"seed {seed}: {time.monotonic() - began_s:.1f} s, {', '.join(done)}", flush=True)
