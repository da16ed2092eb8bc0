"""The folder of a job: who may take it, what it tells of the job, and how a later run goes on with it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from job_folders import COMMAND, claimed, everything, leave, options, status, view_of
from waiting import soon

from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.command_line.options import Options, read_options
from edl_hvd.driver.job_folder.claim import claim
from edl_hvd.driver.job_folder.files import LOCK, RECORD, STATUS, JobRecord, look, replace_file, to_text
from edl_hvd.driver.membership import events
from edl_hvd.driver.status import TrainingProgress, WorkerStatus
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.process_identity import is_alive, start_token
from edl_hvd.settings import runtime_folders

SUPPORT = Path(__file__).parents[4] / "tests" / "support"


@contextlib.contextmanager
def child(code: str = "import time; print('up', flush=True); time.sleep(1000)") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


# --- whose folder it is ---


def test_without_a_flag_the_folder_is_private_and_goes_with_the_job(runtime):
    with claim(options()) as folder:
        assert folder.path.parent == runtime
        assert [stat.S_IMODE(path.stat().st_mode) for path in (runtime, folder.path)] == [0o700, 0o700]
        view = view_of(folder.path)
        assert (view.record.pid, view.record.command, view.record.folder) == (os.getpid(), COMMAND, os.getcwd())
        assert view.running
        assert folder.checkpoint_variable({}) == {}
        assert folder.resume_line == ""
        with folder.history() as file:
            assert file is None
    assert list(runtime.iterdir()) == []


def test_a_runtime_folder_of_somebody_else_is_not_used(runtime, tmp_path):
    (tmp_path / "theirs").mkdir()
    runtime.symlink_to(tmp_path / "theirs")
    with pytest.raises(PlatformError, match=r"is no folder.* set XDG_RUNTIME_DIR"), claim(options()):
        pass
    runtime.unlink()
    if os.getuid() == 0:
        runtime.mkdir()
        os.chown(runtime, 12345, 12345)
        with pytest.raises(PlatformError, match="belongs to user 12345"), claim(options()):
            pass
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_runtime_folder_that_cannot_be_used_costs_a_named_job_only_its_entry(runtime, tmp_path):
    runtime.write_text("in the way")
    with claim(options(tmp_path / "job")) as folder:
        assert view_of(folder.path).running


def test_the_runtime_folder_of_another_user_or_of_a_login_that_is_over_is_passed_over(tmp_path, monkeypatch):
    everywhere = Path(f"/tmp/edl_hvd-{os.getuid()}")
    assert runtime_folders({"XDG_RUNTIME_DIR": str(tmp_path)}) == (tmp_path / "edl_hvd", everywhere)
    assert runtime_folders({}) == runtime_folders({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == (everywhere,)
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, -1)
        assert runtime_folders({"XDG_RUNTIME_DIR": str(tmp_path)}) == (everywhere,)


def test_what_a_killed_edlrun_has_left_goes_after_a_day_and_what_is_not_ours_stays(runtime, tmp_path):
    runtime.mkdir()
    old, young = runtime / "1-old", runtime / "2-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / STATUS).write_text("{}")
    (runtime / "3-link").symlink_to(tmp_path)
    (runtime / "file-abc.answer").write_text("of a discovery script")
    two_days_ago = time.time() - 2 * 86_400
    for path in (old, runtime / "3-link", runtime / "file-abc.answer"):
        os.utime(path, (two_days_ago, two_days_ago), follow_symlinks=False)
    with claim(options()) as folder:
        assert sorted(path.name for path in runtime.iterdir()) == sorted(
            [folder.path.name, "2-young", "file-abc.answer"]
        )
    assert tmp_path.exists()


# --- one at a time ---


def test_a_folder_in_which_an_edlrun_lives_is_refused_to_others_with_and_without_resume(runtime, tmp_path):
    job_dir = tmp_path / "job"
    leave(job_dir, status(step=5))
    code = f"""if True:
        import sys, time
        sys.path.insert(0, {str(SUPPORT)!r})
        from pathlib import Path
        from job_folders import claim, options
        with claim(options(Path({str(job_dir)!r}), resume=True)):
            print("up", flush=True)
            time.sleep(1000)
    """
    with child(code) as other:
        for resume in (False, True):
            with pytest.raises(UsageError) as refusal, claim(options(job_dir, resume)):
                pass
            words = f"--job-dir {job_dir} is in use: edlrun runs there on host {socket.gethostname()} as process "
            assert str(refusal.value).startswith(f"{words}{other.pid} since 20")
            assert "\n" not in str(refusal.value)
        (job_dir / LOCK).unlink()
        with pytest.raises(UsageError, match=f"as process {other.pid} since"), claim(options(job_dir, resume=True)):
            pass
    assert view_of(job_dir).dead
    with claimed(job_dir, resume=True) as folder:
        assert folder.record.run == 3


def test_whoever_looks_at_a_job_keeps_no_edlrun_from_starting(runtime, tmp_path):
    job_dir = tmp_path / "job"
    leave(job_dir, status("ended", end=events.End(0)))
    ending = threading.Event()

    def keep_looking() -> None:
        while not ending.is_set():
            look(job_dir)

    looking = threading.Thread(target=keep_looking)
    looking.start()
    try:
        for _ in range(20):
            leave(job_dir)
    finally:
        ending.set()
        soon(looking)


def test_a_used_folder_is_refused_in_one_line_that_says_what_it_holds_and_how_to_go_on(runtime, tmp_path):
    job_dir = tmp_path / "job"
    leave(job_dir, status("ended", 412, end=events.End(75, "every host is left")))
    before = {path.name: path.read_bytes() for path in job_dir.iterdir()}
    with pytest.raises(UsageError) as refusal, claim(options(job_dir)):
        pass
    line = str(refusal.value)
    assert line.startswith(f"--job-dir {job_dir} holds a job of 20")
    assert "(python train.py --name 'two words'), which reached step 412 and ended with exit code 75; " in line
    assert line.endswith("go on with --resume, or name another --job-dir")
    assert {path.name: path.read_bytes() for path in job_dir.iterdir()} == before, "nothing is changed"


def test_a_folder_whose_edlrun_was_killed_is_refused_as_well(runtime, tmp_path):
    leave(tmp_path / "job", status(step=7))
    with (
        pytest.raises(UsageError, match="reached step 7 before its edlrun was killed"),
        claim(options(tmp_path / "job")),
    ):
        pass


def test_a_command_of_many_lines_is_told_in_one(runtime, tmp_path):
    with claimed(tmp_path) as folder:
        folder.write_status(status(step=7))
    record = view_of(tmp_path).record
    replace_file(tmp_path / RECORD, to_text(replace(record, command=("python", "-c", "import sys\n" * 50))))
    with pytest.raises(UsageError) as refusal, claim(options(tmp_path)):
        pass
    assert "(python -c 'import sys import sys import sys " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_in_which_nothing_was_trained_may_be_used_again(runtime, tmp_path):
    job_dir = tmp_path / "job"
    leave(job_dir, status("ended", end=events.End(1, "the script cannot start")))
    with claimed(job_dir) as folder:
        assert folder.record.run == 2
    (job_dir / "checkpoints" / ".partial").mkdir(parents=True)
    leave(job_dir)
    (job_dir / "checkpoints" / "one").touch()
    with pytest.raises(UsageError, match=r"which has checkpoints .*; go on with --resume"), claim(options(job_dir)):
        pass


def test_a_damaged_folder_is_refused_in_one_line(runtime, tmp_path):
    (tmp_path / RECORD).write_text('{"host": 3}')
    with pytest.raises(UsageError, match=r"cannot read .*job\.json: JobRecord lacks"), claim(options(tmp_path)):
        pass


def test_a_folder_that_cannot_be_used_is_one_error(runtime, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be used: .*File exists"), claim(options(tmp_path / "file")):
        pass


# --- going on ---


def test_going_on_takes_over_what_the_folder_knows(runtime, tmp_path):
    job_dir = tmp_path / "job"
    with claimed(job_dir) as folder:
        began_at_s = folder.record.began_at_s
        assert folder.begun.progress == TrainingProgress()
        with folder.history() as file:
            assert file is not None
            file.write("first")
        folder.write_status(replace(status(step=30), progress=TrainingProgress(28, 30, 240, 9.5, 20, 3.0)))
    with claimed(job_dir, resume=True) as folder:
        assert folder.begun.progress == TrainingProgress(known_step=30, saved_step=20)
        assert (folder.record.run, folder.record.began_at_s) == (2, began_at_s)
        assert folder.record.started_at_s > began_at_s
        with folder.history() as file:
            assert file is not None
            file.write("second")
    # Killed before anything happened: the third still knows.
    with claimed(job_dir, resume=True) as folder:
        assert folder.begun.progress.known_step == 30
    assert [(job_dir / name).read_text() for name in ("history.jsonl", "history-2.jsonl")] == ["first", "second"]
    assert folder.resume_line == f"edlrun --resume --job-dir {job_dir}"


@pytest.mark.parametrize("text", ["", "{", '{"at_s": "now"}', "[" * 100_000])
def test_a_status_that_does_not_read_counts_as_progress(runtime, tmp_path, text):
    """After a power failure some file systems have the new file without its content."""
    leave(tmp_path, status(step=30))
    (tmp_path / STATUS).write_text(text)
    with pytest.raises(UsageError, match="whose status does not read"), claim(options(tmp_path)):
        pass
    with claimed(tmp_path, resume=True) as folder:
        assert folder.begun.progress.known_step == 1


def test_checkpoints_go_into_the_folder_unless_the_environment_says_otherwise(runtime, tmp_path):
    with claimed(tmp_path) as folder:
        default = {"EDL_HVD_CHECKPOINT": f"{tmp_path}/checkpoints"}
        assert folder.checkpoint_variable({}) == folder.checkpoint_variable({"EDL_HVD_CHECKPOINT": ""}) == default
        assert folder.checkpoint_variable({"EDL_HVD_CHECKPOINT": "s3://bucket/run"}) == {}


def test_each_job_has_a_seed_of_its_own_which_stays_when_it_goes_on(runtime, tmp_path):
    leave(tmp_path / "job", status(step=7))
    seed = view_of(tmp_path / "job").record.seed
    assert 1 <= seed < 2**32
    with claimed(tmp_path / "job", resume=True) as folder, claimed(tmp_path / "other") as other:
        assert folder.record.seed == seed != other.record.seed
        assert folder.hash_variable({}) == {"PYTHONHASHSEED": str(seed)}
        assert folder.hash_variable({"PYTHONHASHSEED": "0"}) == {}


def test_a_job_of_a_version_without_seeds_gets_one_when_it_goes_on(runtime, tmp_path):
    leave(tmp_path / "job", status(step=7))
    fields = asdict(view_of(tmp_path / "job").record)
    del fields["seed"]
    replace_file(tmp_path / "job" / RECORD, json.dumps(fields))
    with claimed(tmp_path / "job", resume=True) as folder:
        assert folder.record.seed > 0


def test_workers_that_an_earlier_edlrun_has_left_are_known_until_they_are_gone(runtime, tmp_path):
    with child() as orphan, child() as another:
        workers = (
            WorkerStatus("a:0", "member", 0, pid=orphan.pid, start_token=start_token(orphan.pid)),
            WorkerStatus("a:1", "member", 1, pid=another.pid, start_token="of a process that was here before"),
            WorkerStatus("a:2", "empty"),
        )
        leave(tmp_path, status(step=3, workers=workers))
        with claimed(tmp_path, resume=True) as folder:
            assert [(one.worker, one.state) for one in folder.orphans] == [("a:0", "orphaned")]
        with claimed(tmp_path, resume=True) as folder:  # the one before was killed while it waited
            assert [one.worker for one in folder.orphans] == ["a:0"]
            orphan.kill()
            soon(orphan)
            assert folder.orphans == ()


def test_a_process_is_told_from_a_later_one_and_from_its_own_remains():
    with child() as process:
        mark = start_token(process.pid)
        assert is_alive(process.pid, mark)
        assert mark != start_token(os.getpid()) != ""
        assert not is_alive(os.getpid(), mark)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process.pid, mark), "nobody has asked for its exit code yet, and still it has ended"
    assert start_token(process.pid) == ""
    assert not is_alive(process.pid, "")


GIVEN = {"-np": "2", "--min-np": "1", "--hosts": "localhost:2", "--record": "/tmp/record"}


def recalled(job_dir: Path, given: dict[str, str], command: tuple[str, ...] = ()) -> Options:
    given = {"--resume": "1", "--job-dir": str(job_dir), **given}
    return read_options(command, given, {"PATH": os.defpath})


def test_without_a_command_it_and_its_flags_are_those_that_the_job_had(runtime, tmp_path):
    leave(tmp_path, status(step=3), given=GIVEN)
    view = view_of(tmp_path)
    replace_file(tmp_path / RECORD, to_text(replace(view.record, command=("sh", "train.sh"))))
    found = recalled(tmp_path, {})
    assert (found.command, found.rules.num_proc, found.rules.min_np) == (("sh", "train.sh"), 2, 1)
    assert found.source == FixedHosts((HostSlots("localhost", 2),))
    assert found.record is None, "it belongs to the run that wrote it"
    assert found.given["--hosts"] == "localhost:2", "a third run finds them as well"
    again = recalled(tmp_path, {"-np": "1", "--host-discovery-script": "echo localhost:1"})
    assert (again.rules.num_proc, again.source.answer().hosts) == (1, (HostSlots("localhost", 1),))
    own = recalled(tmp_path, {"-np": "1"}, ("sh", "other.sh"))
    assert (own.command, own.rules.min_np) == (("sh", "other.sh"), 1), "with a command the line stands for itself"


def test_what_cannot_be_gone_on_with_is_refused_in_one_line(runtime, tmp_path, monkeypatch):
    for job_dir in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError) as refusal:
            recalled(job_dir, {})
        assert str(refusal.value).startswith(f"--resume has nothing to go on in --job-dir {job_dir}, which has no job.")
        assert "\n" not in str(refusal.value)
    leave(tmp_path, status(step=3), given=GIVEN)
    was = os.getcwd()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refusal:
        recalled(tmp_path, {})
    assert str(refusal.value) == (
        f"--resume takes the command from {tmp_path}/job.json, and it was typed in {was}; go there first (cd {was}), "
        "or give the command"
    )


# --- how it stands ---


def test_a_status_is_read_as_it_was_written(runtime, tmp_path):
    with claimed(tmp_path) as folder:
        for one in (everything(), status("ended", end=events.End(1, "bad"))):
            folder.write_status(one)
            assert view_of(tmp_path).status == one


def test_a_job_runs_has_ended_or_is_dead(runtime, tmp_path):
    with claimed(tmp_path) as folder:
        folder.write_status(status(step=4))
        view = view_of(tmp_path)
        assert (view.running, view.dead) == (True, False)
    assert view_of(tmp_path).dead
    with claimed(tmp_path, resume=True) as folder:
        folder.write_status(status("ended", end=events.End(0)))
    view = view_of(tmp_path)
    assert (view.running, view.dead) == (False, False)


def test_where_locks_do_not_reach_a_fresh_status_shows_that_an_edlrun_lives(runtime, tmp_path):
    """A network file system may keep the locks of another host to itself."""
    leave(tmp_path, status(step=4))
    replace_file(tmp_path / RECORD, to_text(replace(view_of(tmp_path).record, host="another")))
    with pytest.raises(UsageError, match="on host another"), claim(options(tmp_path, resume=True)):
        pass
    replace_file(tmp_path / STATUS, to_text(replace(status(step=4), at_s=time.time() - 60)))
    assert view_of(tmp_path).dead
    leave(tmp_path, resume=True)


def test_a_record_has_all_that_it_is_read_with(runtime, tmp_path):
    leave(tmp_path, given={"-np": "2"})
    record = view_of(tmp_path).record
    assert JobRecord(**asdict(record)) == record
    assert record.flags == (("-np", "2"),)
