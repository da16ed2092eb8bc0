"""Buffers that change their shape in the training are those of plain PyTorch on every worker that joins or survives."""

from __future__ import annotations

import pytest
from all_idioms import IDIOMS
from idioms import Job, differences
from simulation import Fault, Simulation

GROWING = [idiom for idiom in IDIOMS if idiom.name in ("growing_bank", "lengthened_ring")]
assert len(GROWING) == 2


@pytest.mark.parametrize("idiom", GROWING, ids=lambda idiom: idiom.name)
@pytest.mark.parametrize(
    ("size", "fault"),
    [(1, Fault(collective, joins=1, politely=True)) for collective in (1, 2, 3, 5)]
    + [(2, Fault(collective, joins=1, politely=True)) for collective in (2, 5, 9, 14, 20)]
    + [(2, Fault(collective, worker=1, leaves=(1,), joins=1)) for collective in (4, 9, 13, 19, 26)]
    + [(3, Fault(collective, worker=1, leaves=(1,))) for collective in (3, 10, 16)],
)
def test_a_buffer_is_the_same_whenever_the_world_changes(idiom, size: int, fault: Fault) -> None:
    expected = idiom.plain(Job(epochs=3))
    simulation = Simulation(size, fault)
    for outcome in simulation.run(lambda: idiom.ours(Job(3, epochs=3))):
        assert not differences(outcome, expected, idiom.tolerance)
    assert len(simulation.worlds) == 2, "the world did not change"


@pytest.mark.parametrize("idiom", GROWING, ids=lambda idiom: idiom.name)
def test_a_job_that_is_resumed_has_the_buffer_of_its_checkpoint(idiom, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EDL_HVD_CHECKPOINT", str(tmp_path))
    Simulation(2).run(lambda: idiom.ours(Job(3, epochs=1)))
    for outcome in Simulation(1).run(lambda: idiom.ours(Job(3, epochs=3))):
        assert not differences(outcome, idiom.plain(Job(epochs=3)), idiom.tolerance)
