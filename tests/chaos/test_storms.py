"""Storms of faults under ``edlrun``: the job completes, every sample counts once, all ranks hold the same."""

from __future__ import annotations

from chaos import START, seeded_faults
from training import Training


def test_a_storm_of_faults_loses_nothing(edlrun, tmp_path, storm_seed):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="10 steps", linger_s=0.5)
    edlrun(START, *seeded_faults(storm_seed), training=training, deadline_s=180)
