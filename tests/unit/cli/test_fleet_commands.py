"""What ``edl-hvd fleet`` prints of jobs, without a daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edl_hvd.cli import fleet as fleet_command
from edl_hvd.cli import fleet_client
from edl_hvd.cli.main import commands
from edl_hvd.errors import PlatformError
from edl_hvd.fleet.messages import (
    Agreed,
    ClaimRequest,
    DeleteRequest,
    FleetReply,
    FleetRequest,
    FleetView,
    JobProgress,
    JobRow,
    ReleaseRequest,
    ViewRequest,
)
from edl_hvd.fleet.state import FleetJob, HeldClaim, JobPhase, JobSpec
from edl_hvd.fleet.store import FleetStore
from edl_hvd.hosts import HostSlots

FAILED = FleetJob(JobSpec("one", ("python", "train.py"), "/work", 1, 4), 0.0, phase=JobPhase.FAILED, why="exit code 1")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command of a fleet that holds one job."""
    FleetStore(tmp_path).close()
    (tmp_path / "jobs" / "one").mkdir(parents=True)

    def run(command: str, *words: str, job: FleetJob = FAILED) -> Result:
        view = FleetView(9.0, (HostSlots("a", 1),), (JobRow(job, JobProgress(), 0.0, 0.0),), (), 1, 0)
        monkeypatch.setattr(fleet_command, "view_of", lambda state_dir: view)
        return CliRunner().invoke(commands, ["fleet", command, "--state", str(tmp_path), *words])

    return run


def test_show_prints_the_last_output_of_a_job_that_failed(fleet: Callable[..., Result], tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(30)]
    (tmp_path / "jobs" / "one" / "output.log").write_text("\n\n".join([*lines, "  \x1b[2Kindex [7] is wrong\n"]))
    shown = fleet("show", "one").output.splitlines()
    assert shown[-21:] == ["its last output", *lines[-19:], "   [2Kindex [7] is wrong"]
    for job in (replace(FAILED, phase=JobPhase.RUNNING), replace(FAILED, phase=JobPhase.COMPLETE)):
        assert "line 29" not in fleet("show", "one", job=job).output


def test_show_prints_a_command_that_a_shell_reads_as_it_was_given(fleet: Callable[..., Result]) -> None:
    words = ("printf", "%s|", "two  words", "[red]", ":bug:", "$HOME", "it's", "a\x1b[2Kb\n\\c", "", "é" * 300)
    job = replace(FAILED, spec=replace(FAILED.spec, command=words))
    line = re.search(r"^command +(.*)$", fleet("show", "one", job=job).output, re.MULTILINE)
    assert line is not None
    assert line[1].isprintable(), "the cursor of the terminal stays where it is"
    read = subprocess.run(["bash", "-c", line[1]], capture_output=True, text=True, check=True).stdout
    assert read == "".join(f"{word}|" for word in words[2:])


def test_a_job_that_failed_and_printed_nothing_is_shown_without_output(fleet: Callable[..., Result]) -> None:
    done = fleet("show", "one")
    assert (done.exit_code, "its last output" in done.output) == (0, False)


@pytest.mark.parametrize("command", [("list",), ("show", "one")])
def test_a_long_reason_is_one_line_where_no_terminal_is(fleet: Callable[..., Result], command: tuple[str, ...]) -> None:
    why = "step 9 failed: ValueError: " + " ".join(f"label{number}" for number in range(60))
    lines = fleet(*command, job=replace(FAILED, why=why)).output.splitlines()
    assert sum(why in line for line in lines) == 1
    assert all(line == line.rstrip() for line in lines)


def test_flags_that_no_shell_reads_are_refused_by_name(fleet: Callable[..., Result]) -> None:
    done = fleet("submit", "--name", "two", "--edlrun", "'x", "--min", "1", "--", "true")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        'error: --edlrun "\'x" is not usable: No closing quotation; expected flags as a shell reads them, e.g. '
        "'--drain-lead 30'\n"
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--bogus", "No such option"),
        ("--verbose --bogus=3", "See 'edlrun --help'"),
        ("--drain-lead soon", "--drain-lead 'soon' cannot be used; expected a time of at least 0 s, e.g. '30' or"),
        ("--spares x --ssh-port 0", "expected a whole number, at least 0; --ssh-port '0' cannot be used"),
        ("--record", "Option '--record' requires an argument"),
        ("--record nowhere/x", "--record 'nowhere/x' would be in"),
        ("--verbose=3", "'--verbose' does not take a value"),
        ("--mpi", "--mpi is not for edlrun"),
        ("--drain-lead 3 more", "'more' is no flag; expected flags of edlrun alone"),
        ("--help", "--help and --version start no job; leave them out"),
        ("-v", "--help and --version start no job; leave them out"),
        ("--max-np=3", "the fleet gives --max-np itself; leave it out"),
        ("--agents-port 0 --token-file t", "the fleet gives the hosts itself; leave --agents-port out"),
        ("--leave-before 3 --drain-lead 4", "--leave-before and --drain-lead are one flag; keep --drain-lead alone"),
    ],
)
def test_a_flag_that_edlrun_refuses_is_refused_before_the_job_is_submitted(
    flags: str, problem: str, fleet: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_command, "submit_job", lambda state_dir, spec: pytest.fail("it was submitted"))
    done = fleet("submit", "--name", "two", f"--edlrun={flags}", "--", "true")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --edlrun {flags!r} is not usable: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags", ["", "--drain-lead 30", "--spares 2 --take-over", "--blacklist-cooldown-range 3 9", "--leave-before 3"]
)
def test_flags_that_edlrun_takes_are_submitted_as_they_were_given(
    flags: str, fleet: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[JobSpec] = []
    monkeypatch.setattr(fleet_command, "submit_job", lambda state_dir, spec: specs.append(spec))
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "never")  # the daemon may have another
    done = fleet("submit", "--name", "two", f"--edlrun={flags}", "--", "true")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [spec.flags for spec in specs] == [tuple(flags.split())]


@pytest.mark.parametrize("text", ["abc", "5 steps", "1 epoch", "0", "-3s"])
def test_a_time_that_is_none_is_refused_and_only_times_are_offered(fleet: Callable[..., Result], text: str) -> None:
    done = fleet("claim", "web", "--slots", "1", "--for", text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --for {text!r} is not a time; expected seconds as a number, or e.g. '10s' or '2min', greater than "
        "zero\n"
    )


@pytest.mark.parametrize("where", ["nowhere", "256.0.0.1:80"])
def test_a_daemon_that_cannot_serve_its_page_does_not_say_that_it_shares_hosts(tmp_path: Path, where: str) -> None:
    words = ["fleet", "serve", "-H", "localhost:1", "--state", str(tmp_path), "--http", where]
    done = CliRunner().invoke(commands, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_the_phase_of_a_job_is_a_word_in_json(fleet: Callable[..., Result]) -> None:
    (row,) = json.loads(fleet("list", "--json").stdout)["jobs"]
    assert row["job"]["phase"] == json.loads(fleet("show", "one", "--json").stdout)["job"]["phase"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_claim_whose_wait_is_interrupted_is_released(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[FleetRequest] = []

    def answer(folder: Path, request: FleetRequest) -> FleetReply:
        asked.append(request)
        if isinstance(request, ViewRequest):
            os.kill(os.getpid(), number)
            return FleetView(9.0, (), (), (HeldClaim("web", 2, 0, 5.0),), 0, 0)
        return Agreed("it is so")

    monkeypatch.setattr(fleet_client, "call", answer)
    before = signal.getsignal(number)
    done = CliRunner().invoke(commands, ["fleet", "claim", "web", "--slots", "2", "--state", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (128 + number, "")
    assert done.stderr == "interrupted before 2 slots were free; claim web is released\n"
    assert asked == [ClaimRequest("web", 2, 1000, None), ViewRequest(), ReleaseRequest("web")]
    assert signal.getsignal(number) == before


def test_a_claim_whose_daemon_ends_is_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(folder: Path, request: FleetRequest) -> FleetReply:
        if isinstance(request, ViewRequest):
            raise PlatformError("nobody listens")
        return Agreed("it is so")

    monkeypatch.setattr(fleet_client, "call", answer)
    done = CliRunner().invoke(commands, ["fleet", "claim", "web", "--slots", "2", "--state", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "error: nobody listens; claim web stays in the fleet; release it once the daemon answers: edl-hvd fleet "
        f"release web --state {tmp_path}\n"
    )


def test_delete_ended_takes_those_that_ended_by_themselves_long_enough_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(name: str, phase: JobPhase, changed_s: float, occupied: tuple[HostSlots, ...] = ()) -> JobRow:
        spec = JobSpec(name, ("true",), "/", 1, 1)
        job = FleetJob(spec, 0.0, phase=phase, changed_s=changed_s, occupied=occupied)
        return JobRow(job, JobProgress(), 0.0, 0.0)

    rows = (
        row("old", JobPhase.COMPLETE, 100.0), row("failed", JobPhase.FAILED, 6400.0),
        row("new", JobPhase.COMPLETE, 6500.0), row("stopped", JobPhase.STOPPED, 0.0),
        row("running", JobPhase.RUNNING, 0.0), row("waiting", JobPhase.WAITING, 0.0),
        row("leaving", JobPhase.FAILED, 0.0, (HostSlots("a", 1),)),
    )  # fmt: skip
    view = FleetView(10_000.0, (), rows, (), 0, 0)
    asked: list[FleetRequest] = []

    def call(folder: Path, request: FleetRequest) -> FleetReply:
        if isinstance(request, ViewRequest):
            return view
        asked.append(request)
        return Agreed("is deleted")

    monkeypatch.setattr(fleet_client, "call", call)

    def delete(*words: str) -> Result:
        return CliRunner().invoke(commands, ["fleet", "delete", "--state", str(tmp_path), *words])

    unsure = delete("--ended", "1h")
    assert (unsure.exit_code, asked) == (2, [])
    assert unsure.stderr == (
        "error: cannot delete old, failed: standard input is no terminal on which to confirm it; give --yes\n"
    )
    assert delete("--ended", "1h", "--yes").exit_code == 0
    assert asked == [DeleteRequest("old"), DeleteRequest("failed")]
    none = delete("--ended", "168h", "--yes")
    assert (none.exit_code, none.stdout) == (0, "no job ended 168h ago or earlier\n")
    for words, problem in (
        ((), "NAME is missing; expected one of NAME..."),
        (("one", "--ended", "1h"), "NAME and --ended are both given; expected one of"),
        (("--ended", "soon"), "--ended 'soon' is not a time"),
        (("--ended", "0"), "--ended '0' is not a time"),
    ):
        refused = delete(*words, "--yes")
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr
    assert len(asked) == 2
