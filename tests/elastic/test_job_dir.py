"""What a person sees of a real job and says to it from another terminal, and how a job that stopped goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
from faults import HostChange, Interrupt, Outside
from harness import REPOSITORY, Job, Outcome
from invariants import check, check_faults, check_no_step_lost, no_worker_failed
from training import Training
from waiting import LONG_S, soon

from edl_hvd.driver.job_folder.files import look

HOSTS = ("localhost:1", "127.0.0.1:1")


@dataclass
class Terminal:
    """Another terminal on the machine of a job with this folder.

    Attributes:
        said: What each command ended with and printed, in order.
    """

    job_dir: Path
    said: list[subprocess.CompletedProcess[str]] = field(default_factory=list)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name(words[0]))
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
        done = subprocess.run([program, *words[1:]], env=variables, capture_output=True, text=True, check=False)
        self.said.append(done)
        return done

    def later(self, *words: str, until: str = "") -> Callable[[], object]:
        """Run it when the moment comes; again if need be, until it prints what is waited for."""

        def act() -> None:
            while until not in self.run(*words).stdout:
                self.said.pop()

        return act


def events(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [event for event in outcome.events if event["event"] == kind]


def job_in(job_dir: Path, *faults: Any, flags: tuple[str, ...] = (), **fields: Any) -> Job:
    return Job(hosts=HOSTS, faults=faults, launcher="edlrun", flags=("--job-dir", str(job_dir), *flags), **fields)


# --- while it trains ---


@pytest.fixture(scope="module")
def drained(tmp_path_factory, alone) -> tuple[Terminal, Outcome]:
    """A job that is looked at, asked for nonsense, tried to be started a second time, and asked to leave a host."""
    folder = tmp_path_factory.mktemp("drained")
    terminal = Terminal(folder / "job")
    where = str(terminal.job_dir)
    faults = (
        Outside(terminal.later("edl-hvd", "status", where, until="samples/s"), step=15),
        Outside(terminal.later("edl-hvd", "status", where, "--json"), after=0),
        Outside(terminal.later("edl-hvd", "drain", "node-9", "--job", where), after=1),
        Outside(terminal.later("edlrun", "-np", "1", "--job-dir", where, "sh", "-c", "echo started"), after=2),
        Outside(terminal.later("edl-hvd", "drain", "127.0.0.1", "--job", where, "--notice", "60"), after=3),
        Outside(terminal.later("edl-hvd", "status", where), size=1, after=4, delay_s=2.0),
    )
    training = Training(until_size=1, pause_s=0.05)
    job = job_in(terminal.job_dir, *faults, training=training)
    outcome = harness.run(job, folder / "run", preloaded=True)
    check(job, outcome, alone(training))
    terminal.run("edl-hvd", "status", where)
    return terminal, outcome


def test_status_shows_a_job_while_it_trains(drained):
    done = drained[0].said[0]
    assert done.returncode == 0, done.stderr
    for words in ("training · generation 1 · 2 workers", "samples/s", "none yet", "host "):
        assert words in done.stdout, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if " ago " in line]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("127.0.0.1", "0", "training"),
        ("localhost", "0", "training"),
    ]
    assert sorted(row[2] for row in rows) == ["0", "1"]
    assert all(int(row[4]) > 0 for row in rows), "their steps"


def test_status_as_json_agrees_with_the_trace_of_the_workers(drained):
    terminal, outcome = drained
    shown = json.loads(terminal.said[1].stdout)
    assert (shown["running"], shown["dead"], shown["status"]["state"]) == (True, False, "training")
    pids = {worker["worker"]: worker["pid"] for worker in shown["status"]["workers"]}
    started = {line["worker"]: line["pid"] for line in outcome.lines("start")}
    assert pids == started
    progress = shown["status"]["progress"]
    assert 0 < progress["step"] <= max(line["step"] for line in outcome.lines("step"))
    assert progress["samples"] == 8 * progress["step"]
    assert 0 < progress["samples_per_s"] < 8 / 0.05, "a step takes longer than its pause"


def test_an_unknown_host_is_refused_in_one_line_with_those_there_are(drained):
    done = drained[0].said[2]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the job has no host or worker 'node-9'; its hosts are 127.0.0.1, localhost\n"


def test_a_second_edlrun_in_the_same_folder_is_refused_and_starts_nothing(drained):
    done = drained[0].said[3]
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is in use: edlrun runs there on host " in done.stderr


def test_a_host_that_is_drained_leaves_at_the_next_commit_and_nothing_is_lost(drained):
    """That no step and no sample is lost is what every job is checked for."""
    terminal, outcome = drained
    done = terminal.said[4]
    assert (done.returncode, done.stdout) == (
        0, "1 worker leaves 127.0.0.1 at the next commit; 1 worker stays\n",
    )  # fmt: skip
    assert [event["worker"] for event in events(outcome, "worker_left")] == ["127.0.0.1:0"]
    assert events(outcome, "worker_lost") == []
    assert [event["size"] for event in events(outcome, "world_formed")] == [2, 1]
    assert no_worker_failed(outcome)
    assert "edlrun: host 127.0.0.1 left · 1 worker goes on · step " in outcome.output
    last, first = events(outcome, "worker_left")[0]["step"], events(outcome, "world_formed")[1]["step"]
    assert first == last, "no step is repeated"


def test_status_shows_who_has_left(drained):
    done = drained[0].said[5]
    assert "training · generation 2 · 1 worker" in done.stdout
    assert "127.0.0.1 has left" in done.stdout


def test_status_shows_how_it_ended(drained):
    terminal, outcome = drained
    done = terminal.said[6]
    assert "ended with exit code 0" in done.stdout
    step = outcome.reports[0]["step"]
    assert f"step        {step:,} ·" in done.stdout
    assert f"checkpoint  step {step:,}" in done.stdout, "the last one, which was written at the end"


def test_the_folder_holds_history_and_checkpoints_and_no_socket(drained):
    job_dir = drained[0].job_dir
    assert {path.name for path in job_dir.iterdir()} == {
        "job.json",
        "status.json",
        "lock",
        "history.jsonl",
        "checkpoints",
    }
    assert list(job_dir.glob("checkpoints/**/manifest.json"))
    done = drained[0].run("edl-hvd", "replay", str(job_dir / "history.jsonl"))
    assert done.returncode == 0, done.stdout


# --- going on ---


def power_failure(job_dir: Path) -> None:
    """Everything on the machine ends at once: nobody may see another's end, and save what is left."""
    view = look(job_dir)
    assert view is not None
    assert view.status is not None
    pids = [view.record.pid, *(worker.pid for worker in view.status.workers)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            assert pid is not None
            os.kill(pid, number)


@pytest.mark.parametrize("how", ["killed", "terminated", "power failure"])
def test_a_job_that_stopped_goes_on_where_it_was(run_job, alone, tmp_path, how):
    terminal = Terminal(tmp_path / "job")
    training = Training(epochs=30, pause_s=0.05, checkpoint_every="4 steps" if how == "power failure" else "600s")
    number = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}.get(how)
    stop = Interrupt(10, number) if number else Outside(lambda: power_failure(terminal.job_dir), step=15)
    job = job_in(terminal.job_dir, stop, training=training)
    first = run_job(job, "first")
    assert first.exit_code == (75 if how == "terminated" else -signal.SIGKILL), first.output
    check_faults(job, first)
    check_no_step_lost(job, first)
    last = max(line["step"] for line in first.lines("step"))
    view = look(terminal.job_dir)
    assert view is not None
    assert view.dead == (how != "terminated")
    if how == "terminated":
        assert f"edlrun: go on with: edlrun --resume --job-dir {terminal.job_dir}\n" in first.output
    else:
        assert "dead: its edlrun was killed" in terminal.run("edl-hvd", "status", str(terminal.job_dir)).stdout

    refused = terminal.run("edlrun", "-np", "1", "--job-dir", str(terminal.job_dir), "sh", "-c", "echo started")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "holds a job of 20" in refused.stderr
    assert "go on with --resume, or name another --job-dir" in refused.stderr

    again = Training()
    job = job_in(terminal.job_dir, flags=("--resume",), training=again)
    second = run_job(job, "second")
    check(job, second, alone(again))
    [restored] = events(second, "restore")
    if how == "power failure":  # a checkpoint waits for the one before, which may take longer than four steps
        written = [event["step"] for event in events(first, "checkpoint")]
        assert max(written, default=4) <= restored["step"] <= last
    else:
        assert restored["step"] in (last, last + 1)
    assert (terminal.job_dir / "history-2.jsonl").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_stands_still_when_its_edlrun_was_killed_does_not_hold_up_the_next(run_job, tmp_path, rank):
    """It can neither save nor end; the other one saves, and the job goes on without it after its grace."""
    job_dir, folder = tmp_path / "job", tmp_path / "second"
    again = job_in(job_dir, flags=("--resume",), environment={"EDL_HVD_TERMINATION_GRACE": "1"})
    stopped: list[int] = []
    resumed: list[subprocess.CompletedProcess[str]] = []

    def stop_one_kill_and_go_on() -> None:
        """To its end: ten seconds after the first edlrun has ended, the harness ends what it has left."""
        view = look(job_dir)
        assert view is not None
        assert view.status is not None
        [pid] = [worker.pid for worker in view.status.workers if worker.rank == rank]
        assert pid is not None
        stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)
        os.kill(view.record.pid, signal.SIGKILL)
        harness.prepare(again, folder)
        words, variables = harness.command(again, folder), harness.environment(again, folder, "resumed")
        resumed.append(
            subprocess.run(
                words,
                env=variables,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LONG_S,
            )
        )

    stop = Outside(stop_one_kill_and_go_on, step=10)
    run_job(job_in(job_dir, stop, training=Training(epochs=30, pause_s=0.05)), "first")
    [second] = resumed
    assert f"process {stopped[0]} of the earlier run neither saves nor ends, and is killed" in second.stdout
    assert "training goes on from the checkpoint of step " in second.stdout
    assert second.returncode == 0, second.stdout


@pytest.mark.parametrize("dies", ["rank 0", "the other"])
def test_a_resume_goes_on_though_an_old_worker_dies_beside_the_others(run_job, alone, tmp_path, dies):
    """Three workers on two hosts; a host goes, then edlrun is killed and resumed, and an old worker is killed."""
    job_dir, folder = tmp_path / "job", tmp_path / "second"
    quick = {"EDL_HVD_TERMINATION_GRACE": "3"}
    again = Training(epochs=20)
    resumed_job = replace(
        job_in(job_dir, training=again, environment=quick, flags=("--resume",)), hosts=("localhost:2",)
    )
    old: list[psutil.Process] = []
    codes: list[int] = []

    def kill_both_and_go_on() -> None:
        view = look(job_dir)
        assert view is not None
        assert view.status is not None
        members = {worker.rank: worker.pid for worker in view.status.workers if worker.state == "member"}
        assert sorted(members, key=str) == [0, 1]
        old.extend(psutil.Process(pid) for pid in members.values())
        victim = members[0 if dies == "rank 0" else 1]
        assert victim is not None
        harness.prepare(resumed_job, folder)
        words, variables = harness.command(resumed_job, folder), harness.environment(resumed_job, folder, "resumed")
        with open(folder / "output.txt", "wb") as output:
            os.kill(view.record.pid, signal.SIGKILL)
            time.sleep(0.3)
            second = subprocess.Popen(words, env=variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            time.sleep(0.3)
            with contextlib.suppress(ProcessLookupError):  # it may have saved and gone
                os.kill(victim, signal.SIGKILL)
            try:
                codes.append(soon(second))
            finally:
                if second.poll() is None:
                    second.kill()
                    soon(second)

    faults = (
        HostChange(drop=("127.0.0.1",), step=10, size=3),
        Outside(kill_both_and_go_on, size=2, after=0, delay_s=2.0),
    )
    training = Training(epochs=200, pause_s=0.05, checkpoint_every="4 steps")
    run_job(
        replace(job_in(job_dir, *faults, training=training, environment=quick), hosts=("localhost:2", HOSTS[1])),
        "first",
    )
    assert codes == [0], (folder / "output.txt").read_text()
    assert len(old) == 2
    assert [process for process in old if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    outcome = harness.outcome_of(folder, codes[0], 0.0, [])
    check(resumed_job, outcome, alone(again))
    [restored] = events(outcome, "restore")
    assert restored["step"] >= 4


def kill_once_it_is_known(job_dir: Path) -> None:
    """End ``edlrun`` as soon as its folder says that there is something to lose; that takes a fraction of a second."""
    while (view := look(job_dir)) is None or view.known_step < 1:
        time.sleep(0.01)
    os.kill(view.record.pid, signal.SIGKILL)


def test_a_job_whose_checkpoints_are_lost_does_not_start_over_in_silence(run_job, tmp_path):
    job_dir = tmp_path / "job"
    stop = Outside(lambda: kill_once_it_is_known(job_dir), step=1)
    first = run_job(job_in(job_dir, stop, training=Training(epochs=30, pause_s=0.05)), "first")
    assert first.exit_code == -signal.SIGKILL
    shutil.rmtree(job_dir / "checkpoints")
    second = run_job(job_in(job_dir, flags=("--resume",)), "second")
    assert second.exit_code == 1
    assert "ProgressLostError: the job had reached step " in second.output
    assert second.lines("step") == []
    view = look(job_dir)
    assert view is not None
    assert view.known_step >= 1, "a third run will know it as well"
