"""Replacing the word horovodrun by edlrun is the whole migration: the command line means the same."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from edl_hvd.cli import edlrun
from edl_hvd.cli.edlrun import read_command_line
from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.command_line.options import Options
from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

COMMAND = ("sh", "-c", "true", "--verbose", "-np", "9")

# Answers, for each command line on its standard input, with the variables that horovodrun would give its workers;
# for an empty line with all names of its flags.
HOROVODRUN = """
import argparse, json, sys
from horovod.runner import launch
from horovod.runner.common.util import config_parser
parse = argparse.ArgumentParser.parse_args
for words in map(json.loads, sys.stdin):
    sys.argv = ["horovodrun", *words]
    if not words:
        argparse.ArgumentParser.parse_args = lambda self: sys.exit(json.dumps(sorted(self._option_string_actions)))
    else:
        argparse.ArgumentParser.parse_args = parse
    try:
        print(json.dumps(config_parser.set_env_from_args({}, launch.parse_args())))
    except SystemExit as ending:
        print(ending.code)
"""


def ask_horovodrun(*lines: list[str]) -> list[object]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOROVODRUN],
        input="".join(f"{json.dumps(line)}\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def read(*words: str) -> Options:
    return read_command_line([*words, *COMMAND])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines on standard error when the command line is refused."""
    with pytest.raises(SystemExit) as ending:
        read_command_line(words)
    output = capsys.readouterr()
    assert (ending.value.code, output.out) == (2, "")
    assert re.fullmatch(r"(edlrun: [^\n]+\n)+", output.err), output.err
    return [line.removeprefix("edlrun: ") for line in output.err.splitlines()]


# --- the same words ---


def test_every_flag_of_horovodrun_is_known():
    (names,) = ask_horovodrun([])
    known = {name for flag in edlrun._COMMAND.params for name in (*flag.opts, *flag.secondary_opts)} | {"-h", "--help"}
    assert set(names) - known == set()


def test_a_whole_command_line_of_horovodrun_is_understood(tmp_path):
    key = tmp_path / "key"
    key.touch()
    options = read(
        "-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", "echo localhost",
        "--slots-per-host", "4", "--network-interface", "lo,eth7", "--network-interfaces", "eth8",
        "-p", "2222", "-i", str(key), "--elastic-timeout", "60", "--reset-limit", "5",
        "--blacklist-cooldown-range", "20", "60",
        "--output-filename", str(tmp_path), "--verbose", "--gloo-timeout-seconds", "10", "--start-timeout", "20",
        "--log-level", "INFO", "-prefix-timestamp", "--gloo", "--disable-cache",
    )  # fmt: skip
    assert options.source.answer().hosts == (HostSlots("localhost", 4),)
    assert options == Options(
        command=COMMAND,
        source=options.source,
        poll_every_s=1.0,
        rules=Rules(2, 1, 4, elastic_timeout_s=60, reset_limit=5, cooldown_s=20),
        worker_variables={"HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "HOROVOD_LOG_LEVEL": "INFO"},
        network_interfaces=("lo", "eth7", "eth8"),
        ssh_port=2222,
        ssh_identity_file=str(key),
        start_timeout_s=20,
        output_filename=str(tmp_path),
        prefix_output_with_timestamp=True,
        verbose=True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-np", "2"), ("-np=2",), ("--num-proc", "2"), ("--num-proc=2",), ("--num-p", "2"), ("-n", "2"),
        ("-np", "2", "-H", "localhost:2"), ("-np", "2", "-Hlocalhost:2"), ("-np", "2", "--hosts=localhost:2"),
        ("-np", "2", "--"), ("-np", "2", "--prefix-out", "--elastic", "600"),
    ],
)  # fmt: skip
def test_long_short_and_abbreviated_forms_mean_the_same(words):
    options = read(*words)
    assert (options.rules, options.command) == (Rules(2, 2, 2, hosts_are_fixed=True), COMMAND)
    assert options.source == FixedHosts((HostSlots("localhost", 2),))


def test_the_hostfile_has_both_its_names(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=2")
    for name in ("-hostfile", "--hostfile"):
        assert read("-np", "2", name, str(path)).source == FixedHosts((HostSlots("localhost", 2),))


def test_everything_behind_the_command_is_the_commands():
    assert read_command_line(["-np", "1", "sh", "--", "-np", "7", "--help"]).command == (
        "sh",
        "--",
        "-np",
        "7",
        "--help",
    )
    assert read_command_line(["-np", "1", "--", "sh", "--verbose"]).command == ("sh", "--verbose")


def test_our_own_flags_are_read(tmp_path):
    plan = tmp_path / "plan"
    plan.write_text("0 add localhost:1\n")
    options = read(
        "-np", "1", "--discover", f"schedule:{plan}", "--host-failures", "5", "--failure-window", "5min",
        "--spares", "2", "--record", f"{tmp_path}/record", "--job-dir", str(tmp_path), "--last-call-timeout", "2",
    )  # fmt: skip
    assert options.source.answer().hosts == (HostSlots("localhost", 1),)
    assert (options.record, options.job_dir, options.resume) == (f"{tmp_path}/record", str(tmp_path), False)
    rules = options.rules
    assert (rules.host_failures, rules.failure_window_s, rules.spares, rules.last_call_timeout_s) == (5, 300, 2, 2)


# --- the same variables for the workers ---

TUNED = [
    ["--fusion-threshold-mb", "64", "--cycle-time-ms", "5", "--cache-capacity", "0"],
    ["--cycle-time-ms=3.5", "--hierarchical-allreduce", "--no-hierarchical-allgather", "--torus-allreduce"],
    ["--no-hierarchical-allreduce", "--hierarchical-allgather", "--no-torus-allreduce"],
    ["--autotune", "--autotune-log-file", "log", "--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "2",
     "--autotune-bayes-opt-max-samples", "3", "--autotune-gaussian-process-noise", "0.5"],
    ["--autotune-log-file", "log", "--autotune-warmup-samples", "1"],
    ["--no-autotune", "--autotune-log-file", "log"],
    ["--timeline-filename", "file", "--timeline-mark-cycles"],
    ["--timeline-filename", "file", "--no-timeline-mark-cycles"],
    ["--timeline-mark-cycles"],
    ["--no-stall-check", "--stall-check-warning-time-seconds", "7", "--stall-check-shutdown-time-seconds", "9"],
    ["--stall-check", "--mpi-threads-disable", "--num-nccl-streams", "2", "--tcp", "--thread-affinity", "1"],
    ["--no-mpi-threads-disable", "--gloo-timeout-seconds", "12", "--log-level", "TRACE"],
    ["--log-with-timestamp"], ["--log-without-timestamp"], ["--log-hide-timestamp"], ["--no-log-hide-timestamp"],
    ["--verbose"],
]  # fmt: skip
CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 2.5, cache_capacity: 2048, hierarchical_allreduce: true,
         hierarchical_allgather: false, torus_allreduce: true}
autotune: {enabled: true, log_file: log, warmup_samples: 5, steps_per_sample: 20, bayes_opt_max_samples: 50,
           gaussian_process_noise: 0.9}
timeline: {filename: file, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 3, gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: true}
"""


def test_tuning_flags_become_the_variables_that_horovodrun_makes_of_them(tmp_path):
    config, on = tmp_path / "config.yaml", tmp_path / "on.yaml"
    config.write_text(CONFIG)
    on.write_text("stall_check: {enabled: true}\nautotune: {enabled: false}\nparams:\n")
    lines = [*TUNED, ["--config-file", str(config)], ["--config-file", str(on)],
             ["--cache-capacity", "1", "--no-autotune", "--config-file", str(config), "--stall-check"]]  # fmt: skip
    lines = [["-np", "1", *line] for line in lines]
    expected = ask_horovodrun(*([*line, "true"] for line in lines))
    assert [read(*line).worker_variables for line in lines] == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not read: .*No such file"),
        ("a: [", "does not read: "),
        ("just words", "holds no sections"),
        ("params: 3", "holds no sections"),
        ("params: {fusion: 3}", r"params\.fusion is not known; take it out"),
        ("params: {cache_capacity: many}", "--cache-capacity 'many' cannot be used"),
        ("controller: mpi", "--mpi is not for edlrun"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_one_problem(capsys, tmp_path, content, words):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    (line,) = refusal(capsys, "-np", "1", "--config-file", str(path), *COMMAND)
    assert re.search(words, line)


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["-np", "2", "--min-np", "3", "sh"], "-np 2 is less than --min-np 3"),
        (["-np", "2", "--min-np", "-3", "sh"], "--min-np '-3' cannot be used; expected a whole number, at least 1"),
        (["-np", "2", "--cycle-time-ms", "-3", "sh"], "--cycle-time-ms '-3' cannot be used"),
        (["-np", "2"], "no command is given; put the program behind the flags"),
        (["sh"], "-np is missing; expected the number of workers"),
        (["-np"], "Option '-np' requires an argument"),
        (["-np", "2", "--blacklist-cooldown-range", "5"], "Option '--blacklist-cooldown-range' requires 2 arguments"),
        (["-np", "2", "--hots", "a", "sh"], "No such option"),
        (["-np", "2", "--host", "a", "sh"], "No such option"),
        (["-np", "2", "--mpi", "sh"], "--mpi is not for edlrun"),
        (["-np", "2", "--jsrun", "sh"], "--jsrun is not for edlrun"),
        (["-np", "2", "--mpi-args=--map-by ppr:6:node", "sh"], "--mpi-args is not for edlrun"),
        (["-np", "2", "--binding-args", "--rankfile file", "sh"], "--binding-args is not for edlrun"),
        (["-np", "2", "-cb", "sh"], "--check-build is not for edlrun: run 'edl-hvd doctor' instead"),
    ],
)
def test_a_bad_line_is_refused_in_one_line_with_exit_code_2(capsys, words, start):
    (line,) = refusal(capsys, *words)
    assert line.startswith(start)


def test_all_problems_of_a_line_are_shown_together(capsys):
    told = refusal(capsys, "-np", "3", "--min-np", "9", "--max-np", "1", "-i", "/no/key", "--spares", "x", "-H", "a:b")
    for start in ("--min-np 9 is more", "-np 3 is less", "-np 3 is more", "--spares 'x'", "--hosts 'a:b'",
                  "--ssh-identity-file '/no/key'", "no command"):  # fmt: skip
        assert sum(line.startswith(start) for line in told) == 1, start
    assert len(told) == 7


# --- the program ---


def test_the_help_is_grouped_fits_80_columns_and_shows_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ending:
        read_command_line(["--help"])
    text = capsys.readouterr().out
    assert ending.value.code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)] == list(edlrun._GROUPS)
    assert "  Examples:\n    edlrun -np 2 --min-np 1 python train.py\n" in text
    for flag in edlrun._FLAGS:
        for name in (*flag.opts, *flag.secondary_opts):
            assert flag.hidden != bool(re.search(rf"(?<![\w-]){name}(?![\w-])", text)), name


def test_the_defaults_that_the_help_names_are_those_of_the_code():
    help_of = {flag.opts[0]: flag.help or "" for flag in edlrun._FLAGS}
    for flag, default in [
        ("--spares", Rules.spares), ("--last-call-timeout", Rules.last_call_timeout_s),
        ("--host-failures", Rules.host_failures),
        ("--failure-window", Rules.failure_window_s), ("--blacklist-cooldown-range", Rules.cooldown_s),
        ("--elastic-timeout", Rules.elastic_timeout_s), ("--start-timeout", Options.start_timeout_s),
    ]:  # fmt: skip
        assert re.search(rf"[\[ ]{default:g}\]$", help_of[flag]), flag


def test_version_is_shown(capsys):
    for word in ("-v", "--version"):
        with pytest.raises(SystemExit) as ending:
            read_command_line([word])
        assert ending.value.code == 0
        assert re.fullmatch(r"edlrun \d+\.\d+.*\n", capsys.readouterr().out)


def run_main(monkeypatch: pytest.MonkeyPatch, ending: int | Exception) -> tuple[object, list[object]]:
    """The exit code of ``main`` when the job ends like this, and what the job was given."""
    given: list[object] = []

    def run_job(options: Options, screen: object) -> int:
        given.extend([options, screen])
        if isinstance(ending, Exception):
            raise ending
        return ending

    module = ModuleType("edl_hvd.driver.run")
    module.run_job = run_job
    monkeypatch.setitem(sys.modules, "edl_hvd.driver.run", module)
    monkeypatch.setattr(sys, "argv", ["edlrun", "-np", "1", *COMMAND])
    with pytest.raises(SystemExit) as raised:
        edlrun.main()
    return raised.value.code, given


def test_the_exit_code_is_that_of_the_job(monkeypatch):
    code, given = run_main(monkeypatch, 75)
    assert code == 75
    assert given[0] == read("-np", "1")


def test_a_folder_that_is_refused_ends_in_one_line_and_exit_code_2(monkeypatch, capsys):
    assert run_main(monkeypatch, UsageError("--job-dir a is in use"))[0] == 2
    assert capsys.readouterr().err == "edlrun: --job-dir a is in use\n"


def test_an_error_made_on_purpose_ends_in_its_message(monkeypatch, capsys):
    assert run_main(monkeypatch, DiscoveryError("no hosts"))[0] == 1
    assert capsys.readouterr().err == "edlrun: no hosts\n"


def test_the_program_starts_without_torch_and_horovod_and_refuses_as_a_process(tmp_path):
    code = (
        "import sys, edl_hvd.cli.edlrun; print([name for name in ('torch', 'horovod', 'boto3') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    result = subprocess.run(
        [sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", "1", "no_such_program"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_the_program_is_installed_under_its_name():
    settings = configparser.ConfigParser()
    settings.read(Path(edlrun.__file__).parent.parent.parent / "setup.cfg")
    assert "edlrun = edl_hvd.cli.edlrun:main" in settings["options.entry_points"]["console_scripts"].split("\n")
