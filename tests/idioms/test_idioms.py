"""Ordinary training code learns the same with edl_hvd as in plain PyTorch, in every world, or is refused in a sentence.

The plain script runs in one process with the whole global batch. The other runs in simulated worlds of 1 to 4 workers,
with even and uneven shares, one and several micro-batches, idle workers, and with a worker that is killed while another
joins, at many moments: the same ones for all, and those that a seed chooses out of the whole job.

``pytest tests/idioms --fault-seeds 100`` tries a hundred of these with each idiom, and the name of the test says which.
"""

from __future__ import annotations

import functools
import random
import warnings

import pytest
import torch
from all_idioms import IDIOMS
from idioms import Idiom, Job, differences, flattened
from simulation import Fault, Simulation

from edl_hvd.errors import EdlHvdWarning, UsageError

SIZES = (1, 2, 3, 4)
WRITTEN_TWICE = [idiom for idiom in IDIOMS if not idiom.refused]
# At the n-th collective of worker 1: in its first steps, between them, in a commit, at the end of an epoch.
FAULTS = [Fault(collective, worker=1, leaves=(1,), joins=1) for collective in (3, 8, 17)] + [
    Fault(11, worker=0, leaves=(0,)),
    Fault(6, worker=1, leaves=(2,), joins=2, politely=True),
]
WITH_FAULTS = [idiom for idiom in WRITTEN_TWICE if idiom.faults]
# In which there is something to lose late in the job: what hooks of steps do, and where the script leaves its loops.
THROUGHOUT = ("step_hook", "break_flat", "last_step", "early_stopping_behind")


@functools.lru_cache(None)
def plain_outcome(idiom: Idiom):
    torch.manual_seed(0)
    return idiom.plain(Job())


@functools.lru_cache(None)
def collectives(idiom: Idiom, job: Job, size: int) -> list[int]:
    """How many each worker makes in a job without a fault."""
    simulation = Simulation(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        simulation.run(lambda: idiom.ours(job))
    return simulation.collectives


def fault_of(seed: random.Random, counts: list[int]) -> Fault:
    """At any collective of any worker, whose numbers of them are given."""
    size = len(counts)
    worker = seed.randrange(size)
    collective = seed.randint(1, counts[worker])
    joins = seed.randrange(2)
    kind = seed.choice(["dies", "another dies", "torn", "asked to go", "asked to come"])
    if kind == "asked to come":
        return Fault(collective, worker, joins=1, politely=True)
    if kind == "asked to go":
        return Fault(collective, worker, (seed.randrange(size),), joins, politely=True)
    if kind == "another dies":
        return Fault(collective, worker, ((worker + 1) % size,), joins)
    if kind == "torn" and size > 2:
        others = [other for other in range(size) if other != worker]
        return Fault(collective, worker, (worker,), joins, torn=(seed.choice(others),))
    return Fault(collective, worker, (worker,), joins)


def run(idiom: Idiom, job: Job, size: int, fault: Fault | None = None) -> list:
    simulation = Simulation(size, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)  # workers without a micro-batch are meant here
        outcomes = simulation.run(lambda: idiom.ours(job))
    if fault is not None:
        assert simulation.has_struck, "the fault did not come"
        # What is asked for behind the last commit changes nothing.
        assert len(simulation.worlds) == 2 or (fault.politely and fault not in FAULTS), "the world did not change"
    return outcomes


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("idiom", WRITTEN_TWICE, ids=lambda idiom: idiom.name)
def test_it_learns_what_plain_pytorch_learns(idiom, size):
    for micro_batch in idiom.micro_batches:
        for outcome in run(idiom, Job(micro_batch), size):
            said = differences(outcome, plain_outcome(idiom), idiom.tolerance)
            assert not said, f"micro_batch={micro_batch}: {said}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"collective{fault.collective}")
@pytest.mark.parametrize("idiom", WITH_FAULTS, ids=lambda idiom: idiom.name)
def test_it_learns_the_same_when_workers_come_and_go(idiom, fault):
    for outcome in run(idiom, Job(idiom.micro_batches[0]), 3, fault):
        said = differences(outcome, plain_outcome(idiom), idiom.tolerance)
        assert not said, said


@pytest.mark.parametrize("idiom", WITH_FAULTS, ids=lambda idiom: idiom.name)
def test_it_learns_the_same_wherever_a_fault_strikes(idiom, fault_seed):
    seed = random.Random(f"{idiom.name}-{fault_seed}")
    job, size = Job(seed.choice(idiom.micro_batches)), seed.choice([2, 3, 3])
    fault = fault_of(seed, collectives(idiom, job, size))
    for outcome in run(idiom, job, size, fault):
        said = differences(outcome, plain_outcome(idiom), idiom.tolerance, but=idiom.seen)
        assert not said, f"micro_batch={job.micro_batch}, {size} workers, {fault}: {said}"


@pytest.mark.parametrize("idiom", [i for i in WITH_FAULTS if i.name in THROUGHOUT], ids=lambda idiom: idiom.name)
def test_it_learns_the_same_at_whichever_of_its_collectives_a_worker_dies(idiom):
    job = Job(6)  # of which the third worker gets nothing
    for collective in range(1, collectives(idiom, job, 3)[0] + 1):
        for outcome in run(idiom, job, 3, Fault(collective, leaves=(0,), joins=1)):
            said = differences(outcome, plain_outcome(idiom), idiom.tolerance)
            assert not said, f"collective {collective}: {said}"


def test_it_ends_where_it_ends_though_a_worker_dies_beside_the_last_checkpoint(monkeypatch, tmp_path):
    idiom = next(idiom for idiom in WITH_FAULTS if idiom.name == "last_step")

    def counted_and_compared(fault):
        monkeypatch.setenv("EDL_HVD_CHECKPOINT", str(tmp_path / f"{fault}"))
        simulation = Simulation(2, fault)
        for outcome in simulation.run(lambda: idiom.ours(Job())):
            assert not differences(outcome, plain_outcome(idiom), idiom.tolerance), fault
        return simulation.collectives[0]

    count = counted_and_compared(None)  # another time there may be some less, while the writer is waited for
    for back in range(7):
        counted_and_compared(Fault(count - back, leaves=(0,), joins=1))


@pytest.mark.parametrize("idiom", [i for i in WRITTEN_TWICE if i.exact], ids=lambda idiom: idiom.name)
def test_its_bits_are_the_same_in_every_world(idiom):
    job = Job(3, exact=True)
    first = dict(flattened(run(idiom, job, 1)[0]))
    for size in SIZES[1:]:
        for outcome in run(idiom, job, size):
            found = dict(flattened(outcome))
            assert found.keys() == first.keys()
            assert not [path for path in first if not torch.equal(found[path], first[path])], size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("idiom", [i for i in IDIOMS if i.refused], ids=lambda idiom: idiom.name)
def test_it_is_refused_in_one_sentence(idiom, size):
    for micro_batch in idiom.micro_batches:
        with pytest.raises(UsageError, match=idiom.refused):
            run(idiom, Job(micro_batch), size)
