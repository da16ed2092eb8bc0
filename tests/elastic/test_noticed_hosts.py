"""A host hears from its cloud that it will go: its worker leaves at the next commit, under either launcher."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Outside
from harness import Job, Outcome
from invariants import check
from metadata_server import Ec2Metadata, GoogleMetadata
from test_terminated import saved, step, training
from training import Training

LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")
LEFT_S = 100
# It stays for some more seconds.
LEAVE_SOON = ("--drain-lead", "97")


@pytest.fixture
def metadata() -> Iterator[Ec2Metadata]:
    with Ec2Metadata() as server:
        yield server


def run_noticed(run, metadata: Ec2Metadata, alone, checkpoints: Path, flags: tuple[str, ...] = (), **fields) -> Outcome:
    def announce() -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LEFT_S))
        metadata.texts["spot/instance-action"] = json.dumps({"action": "terminate", "time": moment})

    what = Training(extra=("notices",), until_size=1, checkpoint=str(checkpoints))
    where = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
    job = Job(faults=(Outside(announce, step=5),), training=what, environment=where,
              flags=(*LONG_GLOO_TIMEOUT, *flags), **fields)  # fmt: skip
    outcome = run(job)
    check(job, outcome, alone(what))
    assert "notice for this host: EC2 will terminate this spot instance" in outcome.output
    [left] = [event["worker"] for event in outcome.events if event["event"] == "worker_left"]
    assert left == "127.0.0.1:0"
    return outcome


def test_under_edlrun_its_host_is_drained_and_nobody_is_lost(run_job, metadata, alone, tmp_path):
    outcome = run_noticed(run_job, metadata, alone, tmp_path / "checkpoints", LEAVE_SOON, launcher="edlrun")
    assert [event for event in outcome.events if event["event"] == "worker_lost"] == []


def test_under_horovodrun_its_worker_saves_what_it_has_and_the_others_go_on(run_job, metadata, alone, tmp_path):
    outcome = run_noticed(run_job, metadata, alone, tmp_path / "checkpoints", launcher="horovodrun")
    [saved] = [event for event in outcome.events if event["event"] == "emergency_checkpoint"]
    assert saved["written"], saved
    assert saved["reason"] == ""


def test_a_process_of_its_own_saves_and_ends_to_be_run_again(tmp_path):
    with GoogleMetadata() as metadata:
        where = {"EDL_HVD_NOTICES": "google", "GCE_METADATA_HOST": metadata.host}
        with training(tmp_path, **where) as process:
            assert process.stdout.readline() == "0\n"
            assert [step(process) for _ in range(3)] == [1, 2, 3]
            metadata.texts["instance/preempted"] = "TRUE"
            assert "notice for this host: " in process.stderr.readline()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 75
    assert (saved(tmp_path)["step"], saved(tmp_path)["written"]) == (4, True)
