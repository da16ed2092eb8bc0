"""Ordinary training code learns the same with edl_hvd as in plain PyTorch, in every world, or is refused in a sentence.

The plain script runs in one process with the whole global batch. The other runs in simulated worlds of 1 to 4 workers,
with even and uneven shares, one and several micro-batches, idle workers, and with a worker that is killed while another
joins, at many moments.
"""

from __future__ import annotations

import functools
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


@functools.lru_cache(None)
def plain_outcome(idiom: Idiom):
    torch.manual_seed(0)
    return idiom.plain(Job())


def run(idiom: Idiom, job: Job, size: int, fault: Fault | None = None) -> list:
    simulation = Simulation(size, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)  # workers without a micro-batch are meant here
        outcomes = simulation.run(lambda: idiom.ours(job))
    if fault is not None:
        assert len(simulation.worlds) == 2, "the fault did not come"
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
@pytest.mark.parametrize("idiom", [i for i in WRITTEN_TWICE if i.faults], ids=lambda idiom: idiom.name)
def test_it_learns_the_same_when_workers_come_and_go(idiom, fault):
    for outcome in run(idiom, Job(idiom.micro_batches[0]), 3, fault):
        said = differences(outcome, plain_outcome(idiom), idiom.tolerance)
        assert not said, said


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
