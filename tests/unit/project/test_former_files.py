"""What earlier versions wrote is read: the folder of a job, its history, its events and its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_world import alone
from job_folders import options, view_of
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.cli.edlrun import read_command_line
from edl_hvd.cli.main import commands
from edl_hvd.driver.job_folder.claim import claim
from edl_hvd.driver.job_folder.files import RECORD, STATUS
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.history import read_history, replay
from edl_hvd.events import read_events
from edl_hvd.simulator.measured import measure

FOLDERS = next(parent for parent in Path(__file__).parents if parent.name == "tests") / "data" / "job_folders"
LAST_STEP = {"61c7af3": 88, "3d96c92": 69}


@pytest.fixture(params=sorted(LAST_STEP))
def version(request: pytest.FixtureRequest) -> str:
    """The commit whose files are read."""
    return str(request.param)


@pytest.fixture
def folder(version: str, tmp_path: Path) -> Path:
    """A copy of the job's folder, which was started in the folder above it."""
    copy = Path(shutil.copytree(FOLDERS / version, tmp_path / "job"))
    record = (copy / RECORD).read_text().replace('"folder": "/tmp"', f'"folder": {json.dumps(str(tmp_path))}')
    (copy / RECORD).write_text(record)
    (tmp_path / "hosts.txt").write_text("localhost:1\n")
    return copy


def shown(*words: object) -> str:
    """What a command of ``edl-hvd`` prints; it has to succeed."""
    done = CliRunner().invoke(commands, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_there_are_files_of_every_version() -> None:
    assert {path.name for path in FOLDERS.iterdir() if path.is_dir()} == LAST_STEP.keys()


def test_status_shows_how_the_job_ended(version: str, folder: Path) -> None:
    text = shown("status", folder)
    assert "ended with exit code 75" in text
    assert f"{LAST_STEP[version]} · {8 * LAST_STEP[version]} samples" in text
    found = json.loads(shown("status", folder, "--json"))
    assert found["status"]["progress"]["known_step"] == LAST_STEP[version]
    assert found["status"]["end"]["code"] == 75


def test_the_status_of_a_job_that_trains_reads(folder: Path) -> None:
    (folder / "status-training.json").replace(folder / STATUS)
    view = view_of(folder)
    assert not view.damaged
    assert view.status is not None
    assert view.status.state == "training"
    assert view.known_step == view.status.progress.known_step > 20
    assert {worker.worker for worker in view.status.workers} == {"localhost:0", "127.0.0.1:0"}
    assert all(worker.incarnation == 1 and worker.start_token for worker in view.status.workers)
    assert "127.0.0.1:0" in json.dumps(json.loads(shown("status", folder, "--json")))


def test_every_decision_of_the_history_is_made_again(folder: Path) -> None:
    history = read_history(folder / "history.jsonl")
    assert (history.rules.last_call_timeout_s, history.rules.drain_lead_s) == (0.3, 5.0)
    decisions = list(replay(history))
    assert [decision for decision in decisions if decision.differs] == []
    happened = {type(decision.event) for decision in decisions}
    assert happened >= {events.HostsFound, events.Ready, events.CaughtUp, events.Exited, events.DrainRequested}
    done = {type(action) for decision in decisions for action in decision.actions}
    assert done >= {events.RequestResize, events.NotifyPeerLost, events.ShutDownWorker, events.QuarantineHost}
    assert decisions[-1].membership.end == events.End(75, "every host is left; run it again to go on")
    assert shown("replay", folder / "history.jsonl").endswith("every host is left; run it again to go on\n")


def test_events_have_present_names(folder: Path) -> None:
    lines = read_events(folder / "events.jsonl")
    by_event: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_event.setdefault(line["event"], []).append(line)
    assert [line["cause"] for line in by_event["resized"]] == ["change", "failure", "change", "change"]
    assert all(line["downtime_s"] > 0 for line in by_event["resized"])
    saved = [*by_event["checkpoint"], *by_event["emergency_checkpoint"]]
    assert all(line["duration_s"] > 0 for line in saved)
    assert {"resize_s", "recover_s", "step_s", "write_s"} <= {cost.name for cost in measure(lines)}


def test_checkpoints_are_listed_shown_verified_and_exported(version: str, folder: Path, tmp_path: Path) -> None:
    url = folder / "checkpoints"
    text = shown("checkpoint", "list", url)
    assert text.count("valid") == len(list((url / "checkpoints").iterdir())) >= 2
    assert text.splitlines()[1].split()[0] == str(LAST_STEP[version])
    assert str(LAST_STEP[version]) in shown("checkpoint", "show", url)
    shown("checkpoint", "verify", url)
    shown("checkpoint", "export", url, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {"weight": (1, 4), "bias": (1,)}


def test_resume_takes_command_flags_and_progress_over(
    version: str, folder: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = read_command_line(["--resume", "--job-dir", str(folder)])
    assert told.command == ("python", "train.py")
    assert (told.rules.last_call_timeout_s, told.rules.drain_lead_s, told.rules.host_failures) == (0.3, 5.0, 1)
    with claim(options(folder, resume=True)) as claimed:
        assert claimed.record.run == 2
        assert claimed.orphans == ()
        begun = claimed.begun.progress
        assert (begun.known_step, begun.saved_step) == (LAST_STEP[version], LAST_STEP[version])


def test_training_goes_on_from_the_checkpoint(version: str, folder: Path) -> None:
    dataset = TensorDataset(torch.rand(64, 4), torch.rand(64, 1))
    model = torch.nn.Linear(4, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = edl_hvd.DistributedOptimizer(adam, model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(len(dataset), global_batch=8, micro_batch=4)
    loader = DataLoader(dataset, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    steps = []

    @edl_hvd.elastic(checkpoint=folder / "checkpoints", events=folder / "more.jsonl")
    def train(state: Any) -> None:
        for _ in state.epochs(LAST_STEP[version] // 8 + 1):
            for x, y in state.batches(loader):
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(state.step)

    with alone():
        train(state)
    [restored] = [line for line in read_events(folder / "more.jsonl") if line["event"] == "restore"]
    assert restored["step"] == LAST_STEP[version]
    assert restored["duration_s"] >= 0
    assert steps[0] >= LAST_STEP[version]
