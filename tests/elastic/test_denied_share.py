"""A job of two workers, one of which may not write its share of a checkpoint for a moment."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy, Refuse
from harness import Job
from invariants import check
from servers import AwsServer
from training import Training

SHARE_OF_RANK_1, ITS_NOTE = "/tensors-00001-of-00002", "-00001.json"


def _forgive_once_it_has_failed(proxy: FaultyProxy, events: Path, ended: threading.Event) -> None:
    """Refuse nothing any more as soon as a worker says that a checkpoint has failed."""
    while not ended.is_set() and not (events.exists() and "checkpoint_failed" in events.read_text()):
        time.sleep(0.02)
    proxy.forgive()


@pytest.mark.parametrize("refused", [(SHARE_OF_RANK_1,), (SHARE_OF_RANK_1, ITS_NOTE)], ids=["share", "share and note"])
def test_a_rank_that_may_not_write_for_a_moment_costs_one_checkpoint(run_job, alone, tmp_path, refused):
    """Rank 0 hears of it over the world, at the next commit, whatever the storage takes from that rank."""
    training = Training(epochs=12, pause_s=0.1, checkpoint_every="3 steps")
    ended = threading.Event()
    with AwsServer() as server, FaultyProxy(server.url) as proxy:
        for words in refused:
            proxy.meet(Refuse(403, "AccessDenied"), "PUT", holding=words, times=None)
        folder = tmp_path / "job"
        forgiving = threading.Thread(target=_forgive_once_it_has_failed, args=(proxy, folder / "events.jsonl", ended))
        forgiving.start()
        environment = {
            **server.environment, "AWS_ENDPOINT_URL": proxy.url, "EDL_HVD_CHECKPOINT": f"s3://{server.new_bucket()}/run",
        }  # fmt: skip
        job = Job(training=training, launcher="edlrun", environment=environment)
        try:
            outcome = run_job(job)
        finally:
            ended.set()
            forgiving.join()
    check(job, outcome, alone(training))
    about = [event for event in outcome.events if event["event"] in ("checkpoint", "checkpoint_failed")]
    failed = [event for event in about if event["event"] == "checkpoint_failed"]
    assert {event["step"] for event in failed} == {failed[0]["step"]}, json.dumps(about, indent=1)
    told = [event["reason"] for event in failed if event["reason"].startswith("rank 1 could not write its share: ")]
    assert len(told) == 1, json.dumps(failed, indent=1)
    assert "s3:PutObject" in told[0], told[0]
    written = [event["step"] for event in about if event["event"] == "checkpoint"]
    assert [step for step in written if failed[0]["step"] < step < outcome.reports[0]["step"]], "before the last one"
