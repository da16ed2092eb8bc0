"""Storms of faults under ``edlrun``: the job completes, every sample counts once, all ranks hold the same."""

from __future__ import annotations

from storm import START, storm
from training import Training


def test_a_storm_of_faults_loses_nothing(edlrun, tmp_path, storm_seed):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="10 steps", linger_s=0.5)
    edlrun(START, *storm(storm_seed), training=training, deadline_s=180)
