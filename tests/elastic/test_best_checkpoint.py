"""The best checkpoint stays, and what was measured is known, when another worker becomes rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import prepared
from prepared import PRELOADED_EDLRUN

from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.checkpoint.reading.files import read_listed
from edl_hvd.checkpoint.tools.inspection import verify
from edl_hvd.events import read_events
from edl_hvd.storage import open_storage

SCRIPT = Path(__file__).with_name("measuring_script.py")
STEPS_PER_EPOCH = 4


def test_the_best_checkpoint_and_the_metrics_survive_the_death_of_rank_0(tmp_path):
    job = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", sys.executable, SCRIPT, tmp_path]
    command = [*PRELOADED_EDLRUN, *job]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "EDL_HVD_EVENTS": str(tmp_path / "events")}
    code, output = prepared.run(list(map(str, command)), environment, tmp_path)
    assert code == 0, output
    assert (tmp_path / "died").exists()
    events = read_events(tmp_path / "events")
    assert len({event["generation"] for event in events if event["event"] == "world_formed"}) > 1
    assert not [event for event in events if event["event"] == "restore"]
    storage = open_storage(str(tmp_path / "checkpoints"))
    listed = chosen_steps(storage, None, every=True)
    assert listed == [5 * STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert not any(verify(storage, step, lambda done, whole: None).damaged for step in listed)
    last, best = (read_listed(storage, step).manifest.metrics for step in listed)
    assert last == {"samples_seen_first": 32.0, "accuracy": 0.8}
    assert best == {"samples_seen_first": 32.0, "accuracy": 0.9}
