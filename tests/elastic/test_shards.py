"""Jobs whose samples come from tar files: each counts once, and they are those of one process alone."""

from __future__ import annotations

import pytest
from faults import add_host, kill
from harness import Job
from invariants import check
from training import Training

pytestmark = pytest.mark.learning


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_each_sample_of_a_stream_counts_once_through_a_growth_and_deaths(run_either, alone, loader_workers):
    """One of them falls inside an epoch, when shards are half read and loaders have prefetched."""
    training = Training(extra=("shards",), loader_workers=loader_workers)
    faults = (add_host("127.1:1", step=5), kill(rank=1, size=3, visit=3), kill(rank=0, at="inside an epoch", after=1))
    job = Job(faults=faults, training=training)
    check(job, run_either(job), alone(training))


def test_a_stream_goes_on_inside_an_epoch_from_a_checkpoint(edlrun, tmp_path):
    """The only worker dies, and what it had saved, after 4 steps of 6 an epoch or the next time, is inside of one.

    The second checkpoint waits for the first, which may take longer than 4 steps.
    """
    checkpoints = str(tmp_path / "checkpoints")
    training = Training(extra=("shards",), loader_workers=1, checkpoint=checkpoints, checkpoint_every="4 steps")
    outcome = edlrun(("localhost:1",), kill(rank=0, step=11), training=training)
    restored = [event["step"] for event in outcome.events if event["event"] == "restore"]
    assert restored in ([4], [8], [9], [10])
