"""What a job does about checkpoints by what it sees itself: when it writes them, and that its ranks still agree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import prepared
from prepared import PRELOADED_EDLRUN

from edl_hvd.events import read_events

SCRIPT = Path(__file__).with_name("watched_script.py")


def train(folder: Path, interval: str, drifting_rank: int) -> list[dict]:
    """Two workers, until a checkpoint is listed before the end; the events."""
    job = ["-np", "2", "-H", "localhost:2", sys.executable, SCRIPT, folder, interval, drifting_rank]
    command = [*PRELOADED_EDLRUN, *job]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "EDL_HVD_EVENTS": str(folder / "events")}
    code, output = prepared.run(list(map(str, command)), environment, folder)
    assert code == 0, output
    return read_events(folder / "events")


def test_a_rank_whose_weights_have_drifted_is_named_in_the_jobs_events(tmp_path):
    events = train(tmp_path, "4 steps", drifting_rank=1)
    drifts = [event for event in events if event["event"] == "replicas_drifted"]
    assert (drifts[0]["step"], drifts[0]["rank"], drifts[0]["names"]) == (4, 1, ["model/weight"])


def test_auto_writes_the_first_checkpoint_after_ten_seconds_and_ranks_that_agree_are_not_mentioned(tmp_path):
    events = train(tmp_path, "auto", drifting_rank=-1)
    first = next(event for event in events if event["event"] == "checkpoint")
    began_s = min(float(path.read_text()) for path in tmp_path.glob("began-*"))
    assert first["time"] - began_s >= 10.0
    assert not [event for event in events if event["event"] in ("replicas_drifted", "checkpoint_failed")]
