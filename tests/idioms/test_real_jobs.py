"""Some of the idioms with real workers, of which one is killed and comes back; and what takes a test of its own."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import harness
import pytest
import torch
from all_idioms import IDIOMS
from faults import kill
from idiom_script import EPOCHS, EXACT, MICRO_BATCHES
from idioms import Job, differences, flattened
from simulation import Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning, UsageError

SCRIPT = Path(__file__).with_name("idiom_script.py")
HOSTS = ("localhost:1", "127.0.0.1:1", "127.1:1")
# What is killed, and when: before a step, or with the gradients of some micro-batches computed.
KILLED = {
    "dcgan": kill(at="reduced", rank=1, step=5, visit=2),  # between the steps of the two optimizers
    "sam": kill(at="reduced", rank=2, step=5, visit=2),  # with the weights at the place that the first pass found
    "lbfgs": kill(at="reduced", rank=0, step=5, visit=3),  # in the middle of a closure's calls
    "group_added_later": kill(rank=1, step=6),  # so that a worker joins after it was added
    "branches": kill(rank=1, step=5),
    "odd_shapes": kill(at="reduced", rank=1, step=5),
    "complex_weights": kill(rank=1, step=5),
    "bfloat16_model": kill(rank=1, step=5),
    "batch_norm_statistics": kill(rank=1, step=5),
    "growing_bank": kill(rank=1, step=5),
}


def idiom_of(name: str):
    return next(idiom for idiom in IDIOMS if idiom.name == name)


@pytest.mark.learning
@pytest.mark.parametrize("name", KILLED)
def test_a_real_job_learns_what_plain_pytorch_learns(name, tmp_path):
    folder = tmp_path / "job"
    discover = ("--host-discovery-script", f"{folder}/discover.sh")
    launch = [*harness.PRELOADED_EDLRUN, "-np", "3", "--min-np", "1", "--max-np", "3", *discover]
    job = harness.Job(
        hosts=HOSTS, faults=(KILLED[name],), own_command=(*launch, sys.executable, str(SCRIPT), name), deadline_s=60
    )
    outcome = harness.run(job, folder)
    assert outcome.exit_code == 0, outcome.output[-6000:]
    assert outcome.fired == {0: 1}
    sizes = [line["size"] for line in outcome.lines("enter")]
    assert min(sizes) == 2, "the others have gone on"
    assert [line["size"] for line in outcome.lines("end")] == [3, 3, 3]

    torch.manual_seed(0)
    expected = dict(flattened(idiom_of(name).plain(Job(epochs=EPOCHS))))
    found = [torch.load(path) for path in sorted(folder.glob("outcome.*.pt"))]
    assert len(found) == 3
    for each in found:
        # Of 32 steps with BatchNorm the rounding alone makes 2e-5, in a world of one, too.
        assert not differences(each, expected, 1e-4 if name == "batch_norm_statistics" else idiom_of(name).tolerance)
    if name in EXACT:
        job = Job(MICRO_BATCHES[name], exact=True, epochs=EPOCHS)
        alone = dict(flattened(Simulation(1).run(lambda: idiom_of(name).ours(job))[0]))
        assert all(torch.equal(each[path], alone[path]) for each in found for path in alone)


def uses_the_last_loss():
    """As many scripts do; a worker without a micro-batch has none."""
    edl_hvd.init()
    job = Job(micro_batch=6)
    model = torch.nn.Linear(6, 3)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for step in state.steps(loader):
            for inputs, target in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), target)
                loss.backward()
            optimizer.step()
            state.losses.append(loss.item())

    train(state)


@pytest.mark.parametrize("size", [3, 4])
def test_a_variable_that_an_idle_worker_lacks_is_explained(size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)  # workers without a micro-batch are meant here
        with pytest.raises(UsageError, match=r"step\.record"):
            Simulation(size).run(uses_the_last_loss)


@pytest.mark.learning
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler")
def test_a_model_that_is_compiled_to_machine_code_learns_the_same(monkeypatch):
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, backend, **options: original(model, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        expected = idiom_of("compiled").plain(Job())
        for found in Simulation(3).run(lambda: idiom_of("compiled").ours(Job(6))):
            assert not differences(found, expected, 1e-5)
