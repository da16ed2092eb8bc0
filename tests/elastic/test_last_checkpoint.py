"""The last checkpoint of a job whose ``edlrun`` is killed together with some of its workers: any survivor writes it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults import Outside
from faulty_proxy import Before, FaultyProxy
from harness import Job, Outcome
from invariants import check, check_faults, check_no_step_lost
from servers import AwsServer
from training import Training
from waiting import LONG_S, soon

from edl_hvd.checkpoint.format import document
from edl_hvd.checkpoint.lease import LeaseHolder, acquire
from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.driver.job_folder.files import look
from edl_hvd.storage import open_storage

HOSTS = ("localhost:1", "127.0.0.1:1", "127.1:1")


def job_in(job_dir: Path, *faults: Any, flags: tuple[str, ...] = (), **fields: Any) -> Job:
    return Job(hosts=HOSTS, faults=faults, launcher="edlrun", flags=("--job-dir", str(job_dir), *flags), **fields)


def kill_with_edlrun(job_dir: Path, ranks: Collection[int]) -> list[psutil.Process]:
    """End ``edlrun`` and the workers of these ranks at one moment; the other workers."""
    view = look(job_dir)
    assert view is not None
    assert view.status is not None
    pids = {worker.rank: worker.pid for worker in view.status.workers}
    assert sorted(pids, key=str) == [0, 1, 2]
    survivors = [psutil.Process(pid) for rank, pid in pids.items() if rank not in ranks]
    for pid in (view.record.pid, *(pids[rank] for rank in ranks)):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    return survivors


def strike(job_dir: Path, ranks: Collection[int], survivors: list[psutil.Process]) -> None:
    """Kill, and wait for the end of the others: the harness ends what it finds ten seconds after the end of edlrun."""
    survivors.extend(kill_with_edlrun(job_dir, ranks))
    wait_for_the_end(survivors)


def wait_for_the_end(processes: Collection[psutil.Process]) -> None:
    began_s = time.monotonic()
    for process in processes:
        process.wait(timeout=LONG_S)
    print(f"ended after {time.monotonic() - began_s:.1f} s")


def last_step(outcome: Outcome, pids: Collection[int]) -> int:
    """The step that a worker of these had committed for certain; it may have committed one more."""
    return max(int(line["step"]) for line in outcome.lines("step") if line["pid"] in pids)


def goes_on(run_job: Callable[..., Outcome], job: Job, alone: Any, last: int) -> Outcome:
    """The second run goes on from the last commit, and counts every sample once."""
    outcome = run_job(job, "second")
    restored = [event["step"] for event in outcome.events if event["event"] == "restore"]
    print(f"committed: {last} or {last + 1}; resumed from: {restored}")
    assert restored in ([last], [last + 1]), outcome.output
    check(job, outcome, alone(job.training))
    return outcome


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 2)], ids=lambda ranks: "-".join(map(str, ranks)))
def test_survivors_save_when_edlrun_dies_together_with_workers(run_job, alone, tmp_path, ranks):
    job_dir, survivors = tmp_path / "job", []
    stop = Outside(lambda: strike(job_dir, ranks, survivors), step=35)
    training = Training(epochs=30, pause_s=0.05, checkpoint_every="30 steps")
    job = job_in(job_dir, stop, training=training)
    first = run_job(job, "first")
    assert first.exit_code == -signal.SIGKILL, first.output
    check_faults(job, first)
    check_no_step_lost(job, first)
    saved = [event for event in first.events if event["event"] == "emergency_checkpoint"]
    assert all(event["written"] for event in saved), saved
    last = last_step(first, [process.pid for process in survivors])
    goes_on(run_job, job_in(job_dir, flags=("--resume",), training=Training(epochs=8)), alone, last)


# --- on S3 ---


@contextmanager
def s3() -> Iterator[tuple[AwsServer, FaultyProxy, dict[str, str]]]:
    """A server, a proxy before it, and the variables of a job whose checkpoints travel through the proxy."""
    with AwsServer() as server, FaultyProxy(server.url) as proxy:
        url = f"s3://{server.new_bucket()}/run"
        yield server, proxy, {**server.environment, "AWS_ENDPOINT_URL": proxy.url, "EDL_HVD_CHECKPOINT": url}


@pytest.mark.parametrize("on_its_way", ["-of-00003", "/manifest"])
def test_survivors_save_when_edlrun_and_rank_0_die_during_a_checkpoint(run_job, alone, tmp_path, on_its_way):
    job_dir, survivors, training = tmp_path / "job", [], Training(epochs=200, pause_s=0.05, checkpoint_every="20 steps")
    begun, killed = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        begun.set()
        soon(killed)

    def strike_when_it_has_begun() -> None:
        soon(begun)
        survivors.extend(kill_with_edlrun(job_dir, [0]))
        killed.set()
        wait_for_the_end(survivors)

    with s3() as (_, proxy, environment):
        proxy.meet(Before(hold), "PUT", holding=on_its_way)
        job = job_in(job_dir, Outside(strike_when_it_has_begun, step=1), training=training, environment=environment)
        first = run_job(job, "first")
        assert first.exit_code == -signal.SIGKILL, first.output
        check_faults(job, first)
        last = last_step(first, [process.pid for process in survivors])
        again = job_in(job_dir, flags=("--resume",), training=Training(epochs=8), environment=environment)
        goes_on(run_job, again, alone, last)


def test_another_survivor_saves_when_the_one_that_saves_dies_too(run_job, alone, tmp_path):
    job_dir, survivors, savers = tmp_path / "job", [], []
    training = Training(epochs=200, pause_s=0.05)

    def kill_saver(path: str) -> None:
        step = path.split("/checkpoints/")[1].partition("/")[0]
        found = client.list_objects_v2(Bucket=bucket, Prefix=f"run/checkpoints/{step}/parts/saver-")["Contents"]
        [claim] = [client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read() for entry in found]
        savers.append(document.decode(claim)["pid"])
        os.kill(savers[0], signal.SIGKILL)

    with s3() as (server, proxy, environment):
        client, bucket = server.client("s3"), environment["EDL_HVD_CHECKPOINT"].split("/")[2]
        proxy.meet(Before(kill_saver), "PUT", holding="-of-00001")
        stop = Outside(lambda: strike(job_dir, [0], survivors), step=10)
        job = job_in(job_dir, stop, training=training, environment=environment)
        first = run_job(job, "first")
        check_faults(job, first)
        [left] = {process.pid for process in survivors} - set(savers)
        assert [event["written"] for event in first.events if event["event"] == "emergency_checkpoint"] == [True]
        again = job_in(job_dir, flags=("--resume",), training=Training(epochs=8), environment=environment)
        goes_on(run_job, again, alone, last_step(first, [left]))


def test_what_survivors_save_does_not_count_once_another_job_has_the_url(run_job, tmp_path, monkeypatch):
    job_dir, training = tmp_path / "job", Training(epochs=200, pause_s=0.05, checkpoint_every="20 steps")
    with s3() as (_, proxy, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        storage = open_storage(environment["EDL_HVD_CHECKPOINT"])

        def take_over(path: str) -> None:
            acquire(storage, LeaseHolder.this_process("another", SYSTEM_CLOCK), SYSTEM_CLOCK, take_over=True)

        proxy.meet(Before(take_over), "PUT", holding="-of-00001")
        stop = Outside(lambda: strike(job_dir, [0], []), step=35)
        first = run_job(job_in(job_dir, stop, training=training, environment=environment), "first")
        assert first.left == []
        steps = chosen_steps(storage, None, every=True)
    saved = [event for event in first.events if event["event"] == "emergency_checkpoint"]
    assert saved
    assert all(not event["written"] and "was taken over by" in event["reason"] for event in saved)
    assert steps == [event["step"] for event in first.events if event["event"] == "checkpoint"][::-1]
