"""A fleet's daemon with real jobs: they share slots, yield, are stopped and go on; the daemon dies and is followed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from faults import Outside, mark_fired
from fleet_daemon import FleetDaemon
from harness import HERE, REPOSITORY, Job, outcome_of, prepare
from invariants import check_faults, check_ledger, check_replicas
from training import Training
from waiting import until

from edl_hvd.fleet.events import TimePassed
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.runs import Runs
from edl_hvd.fleet.state import FleetJob, JobSpec
from edl_hvd.fleet.store import FleetStore, read_fleet_history
from edl_hvd.hosts import HostSlots

SLEEP = ("sleep", "600")


def slots(job: dict[str, Any]) -> int:
    return sum(entry["slots"] for entry in job["given"])


# --- the daemon dies; jobs whose workers only sleep are enough for that ---


def test_a_killed_daemon_is_followed_by_one_that_finds_every_job_and_starts_none_twice(tmp_path):
    with FleetDaemon(tmp_path) as fleet:
        for number, pause_s in enumerate((0.0, 0.1, 0.3, 0.6)):
            fleet.submit(f"job{number}", "--max", "4", command=SLEEP)
            time.sleep(pause_s)
            fleet.kill()
            before = fleet.edlruns()
            fleet.start()
            fleet.until(lambda count=number + 1: len(fleet.edlruns()) == count)
            after = fleet.edlruns()
            assert all(len(pids) == 1 for pids in after.values()), "no job runs twice"
            assert before.items() <= after.items(), "a job that ran is the same process"
        fleet.until(lambda: [slots(job) for job in fleet.jobs().values()] == [1, 1, 1, 1])
        known = {name: [job["pid"]] for name, job in fleet.jobs().items()}
        assert known == fleet.edlruns()
        assert replays(fleet)


def replays(fleet: FleetDaemon) -> bool:
    """Whether every decision is made again as it was."""
    decisions = list(decide_again(read_fleet_history(fleet.state)))
    return len(decisions) > 3 and not any(decision.differs for decision in decisions)


def test_a_job_that_ended_while_no_daemon_ran_is_known_to_have_ended(tmp_path):
    with FleetDaemon(tmp_path) as fleet:
        fleet.submit("one", command=SLEEP)
        fleet.until(lambda: "one" in fleet.edlruns())
        fleet.kill()
        [pid] = fleet.edlruns()["one"]
        kill_whole(fleet, pid)
        fleet.start()
        fleet.until(lambda: fleet.edlruns().get("one", [pid]) != [pid])
        job = fleet.jobs()["one"]
        assert (job["run"], job["failures"]) == (2, 1), "an edlrun that was killed is followed by another"


def kill_whole(fleet: FleetDaemon, pid: int) -> None:
    """Kill an ``edlrun`` and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in fleet.edlruns().get("one", []))


def test_a_daemon_that_is_killed_between_two_steps_of_a_start_leaves_nothing(tmp_path):
    runs = Runs(tmp_path, {"PATH": "/usr/bin:/bin"})
    touched = tmp_path / "touched"
    job = FleetJob(JobSpec("one", ("touch", str(touched)), str(tmp_path), 1, 1), 0.0, given=(HostSlots("a", 1),))
    child = runs.prepare(job)
    assert child.stdin is not None
    child.stdin.close()  # as the end of the daemon does
    assert child.wait(60) != 0
    assert not (tmp_path / "jobs" / "one" / "job.json").exists(), "there never was an edlrun"
    assert not touched.exists()


def test_a_deleted_job_leaves_nothing_and_another_may_have_its_name(tmp_path):
    with FleetDaemon(tmp_path) as fleet:
        folder = fleet.state / "jobs" / "one"
        fleet.submit("one", command=SLEEP)
        fleet.until(lambda: "one" in fleet.edlruns())
        assert "stop it first: edl-hvd fleet stop one" in fleet.ask("delete", "one", "--yes").stderr
        assert fleet.ask("stop", "one").returncode == 0
        fleet.until(lambda: fleet.jobs()["one"]["phase"] == "stopped")
        refused = fleet.ask("delete", "one")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "give --yes" in refused.stderr
        assert folder.is_dir()
        fleet.until(lambda: fleet.ask("delete", "one", "--yes").returncode == 0)  # its workers may still be ending
        fleet.until(lambda: list((fleet.state / "jobs").iterdir()) == [])
        assert fleet.jobs() == {}
        fleet.submit("one", command=("sh", "-c", "exit 3"))
        fleet.until(lambda: fleet.jobs()["one"]["phase"] == "failed")
        assert fleet.jobs()["one"]["run"] == 1
        assert "is deleted" not in fleet.ask("show", "one").stdout, "that was another job"
        assert replays(fleet)


def test_a_daemon_removes_the_folders_that_a_killed_one_was_about_to_remove(tmp_path):
    with FleetDaemon(tmp_path) as fleet:
        fleet.kill()
        store = FleetStore(fleet.state)
        kept = store.read()
        store.keep(kept.fleet, replace(kept.fleet, removing=("one",)), kept.at_s, kept.wall_s, TimePassed(), ())
        store.close()
        for folder in ("one", ".deleted-abc"):
            (fleet.state / "jobs" / folder / "checkpoints").mkdir(parents=True)
        fleet.start()
        fleet.until(lambda: list((fleet.state / "jobs").iterdir()) == [])
        fleet.submit("one", command=SLEEP)
        fleet.until(lambda: "one" in fleet.edlruns())


def test_what_cannot_be_is_one_line_and_touches_no_other_job(tmp_path):
    with FleetDaemon(tmp_path) as fleet:
        fleet.submit("one", command=SLEEP)
        fleet.until(lambda: "one" in fleet.edlruns())
        before = fleet.edlruns()
        for words, problem in (
            (("submit", "--name", "big", "--min", "5", "--", *SLEEP), "needs at least 5 slots"),
            (("submit", "--name", "two", "--min", "3", "--max", "2", "--", *SLEEP), "at most 2 (--max)"),
            (("submit", "--name", "one", "--", *SLEEP), "there is a job one already"),
            (("claim", "web", "--slots", "9"), "needs 9 slots"),
            (("scale", "nobody", "--max", "3"), "there is no job 'nobody'"),
            (("show", "nobody"), "there is no job 'nobody'"),
            (("submit", "--name", "two", "--", "/no/such/program"), "there is no file '/no/such/program'"),
            (("submit", "--name", "two", "--edlrun", "--no-such-flag", "--", *SLEEP), "--no-such-flag"),
        ):
            done = fleet.ask(*words)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
            assert problem in done.stderr
        fleet.write_hosts("# nobody")
        fleet.until(lambda: "lists no host" in (tmp_path / "daemon.log").read_text())
        fleet.submit("late", "--env", "HOROVOD_START_TIMEOUT=never", command=SLEEP)
        fleet.write_hosts("localhost:4")
        fleet.until(lambda: fleet.jobs()["late"]["phase"] == "failed")
        assert "has failed: edlrun: HOROVOD_START_TIMEOUT 'never' cannot be used" in fleet.ask("show", "late").stdout
        assert fleet.edlruns()["one"] == before["one"]
        second = fleet.shell("edl-hvd fleet serve -H localhost:1 --state fleet")
        assert second.returncode == 2
        assert "is in use by another daemon" in second.stderr
        empty = fleet.shell("echo '# nobody' > nobody && edl-hvd fleet serve --discover file:nobody --state other")
        assert (empty.returncode, empty.stderr.count("\n")) == (2, 1)
        assert "lists no host" in empty.stderr


def test_two_jobs_on_one_host_see_gpus_of_their_own_whatever_is_resized(tmp_path):
    tell = ("sh", "-c", "echo sees GPU $CUDA_VISIBLE_DEVICES; exec sleep 600")

    def seen(name: str) -> list[str]:
        output = tmp_path / "fleet" / "jobs" / name / "output.log"
        return sorted(re.findall(r"sees GPU (\S*)", output.read_text())) if output.exists() else []

    with FleetDaemon(tmp_path) as fleet:
        fleet.submit("one", "--max", "3", command=tell)
        fleet.until(lambda: seen("one") == ["0", "1", "2"])
        fleet.submit("two", "--max", "1", command=tell)
        fleet.until(lambda: seen("two") == ["3"])
        assert fleet.ask("scale", "one", "--max", "1").returncode == 0
        fleet.until(lambda: [slots(one) for one in fleet.jobs().values()] == [1, 1])
        fleet.submit("three", "--max", "2", command=tell)
        fleet.until(lambda: seen("three") == ["1", "2"])
        assert seen("one") == ["0", "1", "2"], "the worker that stays was not started again"
        assert re.search(r"devices +localhost: 0 ", fleet.ask("show", "one").stdout)
        claimed = fleet.ask("claim", "web", "--slots", "1", "--devices")
        assert claimed.stdout == "localhost slots=1 devices=2\n", "job three had it before"


# --- jobs that train ---


def test_two_jobs_and_a_claim_share_four_slots_and_every_sample_counts_once(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    with FleetDaemon(tmp_path) as fleet:
        train(fleet, first, "--max", "4")
        fleet.until(lambda: fleet.jobs()["first"]["progress"]["workers"] == 4)
        train(fleet, second, "--max", "2", "--priority", "5")
        fleet.until(lambda: fleet.jobs()["second"]["progress"]["workers"] >= 1)
        shared = {name: slots(job) for name, job in fleet.jobs().items()}
        assert sum(shared.values()) <= 4
        assert min(shared.values()) >= 1
        claimed = fleet.ask("claim", "web", "--slots", "3")
        assert claimed.returncode == 0, claimed.stderr
        jobs = fleet.jobs()
        assert slots(jobs["second"]) == 1, "the one of higher priority keeps its least"
        assert (jobs["first"]["phase"], jobs["first"]["preemptions"]) == ("waiting", 1), jobs["first"]
        fleet.kill()
        fleet.start()
        assert fleet.ask("release", "web").returncode == 0
        fleet.until(lambda: fleet.jobs()["first"]["progress"]["workers"] >= 1)
        assert fleet.ask("stop", "first").returncode == 0
        fleet.until(lambda: fleet.jobs()["first"]["phase"] == "stopped")
        assert fleet.ask("resume", "first").returncode == 0
        fleet.until(lambda: fleet.jobs()["first"]["progress"]["workers"] >= 1)
        for folder in (first, second):
            mark_fired(folder, 0)
        fleet.until(lambda: all(job["phase"] == "complete" for job in fleet.jobs().values()))
        final = fleet.jobs()
        assert final["first"]["resizes"] >= 1
        assert final["first"]["run"] == 3
        assert replays(fleet)
    for folder in (first, second):
        (folder / "output.txt").write_text("")
        outcome = outcome_of(folder, 0, 0.0, [])
        check_faults(TRAINED, outcome)
        check_replicas(outcome)
        check_ledger(TRAINED, outcome)
        entered = [line["step"] for line in outcome.lines("enter") if line["rank"] == 0]
        assert entered == sorted(entered), "each run goes on where the one before it has saved"


# It goes on until the test says that the only fault has struck.
TRAINED = Job(training=Training(pause_s=0.05), faults=(Outside(lambda: None),))


def train(fleet: FleetDaemon, folder: Path, *flags: str) -> None:
    """Submit the training of the other tests."""
    prepare(TRAINED, folder)
    command = (sys.executable, str(HERE / "worker_script.py"), str(folder))
    events = f"EDL_HVD_EVENTS={folder / 'events.jsonl'}"
    fleet.submit(folder.name, "--env", events, *flags, command=command)


def test_a_job_tells_the_fleet_how_it_scales_and_what_is_left(tmp_path):
    """An ordinary script; the planner gets what its driver has measured, and the user sees the time left."""
    with FleetDaemon(tmp_path, hosts=("localhost:2",), flags=("--http", "0")) as fleet:
        log = (fleet.folder / "daemon.log").read_text()
        page = re.search(r"its page is (http://127\.0\.0\.1:\d+/), its metrics", log)
        assert page is not None, log
        fleet.submit("job", "--max", "2", command=(sys.executable, str(REPOSITORY / "examples" / "minimal.py")))
        fleet.until(lambda: fleet.jobs()["job"]["curve"] is not None)
        job = fleet.jobs()["job"]
        assert 2 in job["curve"]["sizes"]
        assert 0 < job["left"] < 20 * 2048
        fleet.until(lambda: fleet.jobs()["job"]["left"] < job["left"])
        shown = fleet.ask("show", "job").stdout
        assert re.search(r"curve +goodput by slots: 1: [\d,]+, 2: [\d,]+", shown), shown
        assert re.search(r"left +\d+ s", shown), shown
        metrics = urlopen(page[1] + "metrics").read().decode()
        assert re.search(r'^edl_hvd_job_left_seconds\{job="job"\} \d+', metrics, re.MULTILINE), metrics
        assert "all that it asks for" in urlopen(page[1]).read().decode()
        fleet.until(lambda: fleet.jobs()["job"]["phase"] == "complete")
        assert fleet.jobs()["job"]["left"] == 0.0
        assert replays(fleet)


def test_a_job_begins_with_what_another_of_its_family_has_measured(tmp_path):
    script = (sys.executable, str(REPOSITORY / "examples" / "minimal.py"))
    with FleetDaemon(tmp_path, hosts=("localhost:2",)) as fleet:
        fleet.submit("first", "--max", "2", "--family", "minimal", command=script)
        fleet.until(lambda: {timing["size"] for timing in fleet.jobs()["first"]["timings"]} >= {2})
        fleet.until(lambda: fleet.jobs()["first"]["phase"] == "complete")
        measured = fleet.jobs()["first"]["timings"]
        assert all(0.1 < timing["step_s"] < 60 for timing in measured), measured
        fleet.submit("other", "--max", "2", "--family", "none-like-it", command=SLEEP)
        fleet.submit("again", "--max", "2", "--family", "minimal", command=script)
        fleet.until(lambda: fleet.jobs()["again"]["curve"] is not None)
        again = fleet.jobs()["again"]
        assert again["timings"] == [], "its driver knows a curve before it has measured anything"
        assert 2 in again["curve"]["sizes"]
        assert fleet.jobs()["other"]["curve"] is None
        assert "minimal; measured" in fleet.ask("show", "first").stdout
        assert replays(fleet)
        for name, given in (("again", True), ("other", False)):
            environment = Path(f"/proc/{fleet.jobs()[name]['pid']}/environ").read_text()
            assert ("EDL_HVD_FAMILY_TIMINGS=[[" in environment) == given


# --- the document ---


def test_the_commands_of_the_document(tmp_path):
    """Those of docs/cluster.md, as they stand there; the script only sleeps."""
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    lines = re.findall(r"^\$ (.*)$", page, re.MULTILINE)
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    with FleetDaemon(tmp_path, state="runs/fleet") as fleet:
        said = {}
        for line in lines:
            if any(word in line for word in (" serve ", " --here ", " delete ")) or line.startswith(("printf", "make")):
                continue
            done = fleet.shell(line)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            said[line] = done.stdout
            if " stop " in line:
                fleet.until(lambda: fleet.jobs()["resnet50"]["phase"] == "stopped")
            elif " resume " in line or " submit " in line:
                fleet.until(lambda: "resnet50" in fleet.edlruns())
        fleet.until(lambda: "train" in fleet.edlruns())
    assert len(said) == 12
    assert "resnet50" in said["edl-hvd fleet list"]
    assert re.search(r"slots +4 of 1 to 4 on localhost:4", said["edl-hvd fleet show resnet50"])
    assert said["edl-hvd fleet claim web --slots 2 --for 60s"] == "localhost:2\n"
    assert re.search(r"bert +0 +2", said["edl-hvd fleet plan --with-job bert:2:8:5"])
    assert "all as recorded" in said["edl-hvd fleet replay"]
