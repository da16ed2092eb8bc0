"""``edl-hvd simulate cluster``, and the benchmark that plays all workloads."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster_profiles import write_profile, write_workload
from recorded_trace import write_trace

from edl_hvd.cli.main import commands
from edl_hvd.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    for name in ("bert", "ncf"):
        write_profile(tmp_path / "profiles", name)
    rows = [(10, "bert", 4, 64), (70, "bert", 2, 64), (100, "ncf", 1, 64)]
    return write_workload(tmp_path / "workloads" / "workload-1.csv", rows)


def test_the_table_and_the_picture_are_for_people(workload: Path, tmp_path: Path) -> None:
    picture = tmp_path / "w.png"
    done = CliRunner().invoke(
        commands,
        ["simulate", "cluster", "--workload", str(workload), "--policy", "ranked,tiresias", "--hosts", "2",
         "--picture", str(picture)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if line.startswith(("ranked", "tiresias"))}
    assert rows["ranked"].endswith("rest of work")
    assert rows["tiresias"].endswith("user's GPUs and batch")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_document_holds_every_job(workload: Path) -> None:
    done = CliRunner().invoke(
        commands,
        ["simulate", "cluster", "--workload", str(workload), "--policy", "fifo", "--costs", "own", "--hosts", "2",
         "--json"],
    )  # fmt: skip
    [result] = json.loads(done.output[done.output.index("[") :])
    assert [job["name"] for job in result["jobs"]] == ["bert-0", "bert-1", "ncf-2"]
    mean_s = sum(job["completion_s"] for job in result["jobs"]) / 3
    assert result["average_s"] == pytest.approx(mean_s)


def test_a_recorded_trace_says_what_is_assumed_of_its_jobs(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", jobs=40)
    words = ["simulate", "cluster", "--workload", str(trace), "--hosts", "8", "--slots", "8"]
    done = CliRunner().invoke(commands, [*words, "--law", "0.6", "--stretch", "2"])
    assert done.exit_code == 0, done.output
    assert "by the law 0.6, up to 2 times a job's GPUs" in done.output
    mean_s = {}
    for stretch in ("1", "4"):
        done = CliRunner().invoke(commands, [*words, "--policy", "ranked", "--stretch", stretch, "--json"])
        [result] = json.loads(done.output[done.output.index("[") :])
        assert len(result["jobs"]) == 40
        mean_s[stretch] = result["average_s"]
    assert mean_s["4"] < mean_s["1"]


def test_what_is_only_for_recorded_traces_or_only_for_profiles_is_refused(workload: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return str(CliRunner().invoke(commands, ["simulate", "cluster", "--workload", *words]).exception)

    trace = str(write_trace(tmp_path / "trace.csv", jobs=10))
    assert "--law and --stretch are for recorded traces" in refused(str(workload), "--law", "0.6")
    assert "--slots is 8; expected 1 to 4" in refused(str(workload), "--slots", "8")
    assert "law 'linear' is not known" in refused(trace, "--law", "linear")
    assert "law '2' is not known" in refused(trace, "--law", "2")
    assert "name their folder: --profiles" in refused(trace, "--law", "pollux")
    assert "--picture draws every moment" in refused(trace, "--picture", "w.png")
    assert "optimus needs the profile" in refused(trace, "--policy", "optimus", "--hosts", "8", "--slots", "8")


def test_bad_input_is_refused_in_one_sentence(workload: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return str(CliRunner().invoke(commands, ["simulate", "cluster", *words]).exception)

    assert "policy 'best' is not known" in refused("--workload", str(workload), "--policy", "best")
    assert "cannot be read" in refused("--workload", str(tmp_path / "none.csv"))
    assert "asks for 4 GPUs, and the cluster has 2" in refused(
        "--workload", str(workload), "--policy", "fifo", "--hosts", "1", "--slots", "2"
    )
    with pytest.raises(UsageError, match="cannot write the picture"):
        CliRunner().invoke(
            commands,
            ["simulate", "cluster", "--workload", str(workload), "--policy", "fifo", "--picture", "/none/w.png"],
            catch_exceptions=False,
        )


def test_simulating_hosts_still_needs_a_trace() -> None:
    done = CliRunner().invoke(commands, ["simulate"])
    assert done.exit_code == 2
    assert "Missing option '--trace'" in done.output


def test_the_benchmark_plays_each_workload_once(workload: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), str(tmp_path), str(tmp_path / "out")]
    words += ["--workloads", "1", "--policies", "fifo,ranked", "--costs", "equal"]
    first, second = (subprocess.run(words, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout.count("workload 1, equal costs") == 2
    assert second.stdout.count("workload 1, equal costs") == 0, "they are there already"
    assert "| equal | ranked | rest of work | 1 |" in second.stdout
    with (tmp_path / "out" / "jobs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
