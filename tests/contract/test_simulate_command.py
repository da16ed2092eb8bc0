"""``edl-hvd simulate`` and ``edl-hvd trace``, as real processes and in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edl_hvd.cli.main import commands
from edl_hvd.clock import SystemClock
from edl_hvd.events import Committed, EventLog, Resized

TRACE = "0,add,a,b,c\n1200000,remove,c\n2400000,add,d\n3600000,end\n"


def simulate(folder: Path, *words: str, trace: str = TRACE) -> Result:
    (folder / "spot.csv").write_text(trace)
    return CliRunner().invoke(commands, ["simulate", "--trace", str(folder / "spot.csv"), *words])


def as_json(folder: Path, *words: str, trace: str = TRACE) -> dict[str, Any]:
    done = simulate(folder, "--json", *words, trace=trace)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def test_the_table_is_for_people(tmp_path: Path) -> None:
    done = simulate(tmp_path)
    lines = [re.split(r" {2,}", line.strip()) for line in done.output.splitlines()]
    assert lines[0] == ["1 h 0 min, 2.7 hosts in the mean and 3 at most, 3 host-hours"]
    assert lines[1] == ["restart from checkpoints", "stock Horovod elastic", "edl_hvd"]
    rows = {name: [float(cell.partition(" ")[0]) for cell in cells] for name, *cells in lines[2:7]}
    assert list(rows) == ["goodput", "work lost", "writing checkpoints", "standing still", "hosts not in the world"]
    assert [sum(column) for column in zip(*rows.values(), strict=True)] == pytest.approx([100] * 3, abs=0.03)
    assert rows["goodput"] == sorted(rows["goodput"])
    assert "useful host-hour" not in done.output, "there is no price"


def test_the_document_holds_everything(tmp_path: Path) -> None:
    document = as_json(tmp_path, "--price", "3.6")
    assert document["trace"] == {"seconds": 3600, "most_hosts": 3, "host_seconds": 9600}
    assert set(document["systems"]) == {"restart", "horovod", "edl_hvd"}
    for system in document["systems"].values():
        assert system["useful"] / system["possible"] == pytest.approx(system["goodput"])
        assert system["usd_per_useful_hour"] == pytest.approx(3.6 / system["goodput"])
        assert len(system["curve"]) == 144
    assert document["systems"]["edl_hvd"]["changes"] == 2


def test_the_document_shows_what_the_command_prints() -> None:
    root = Path(__file__).parents[2]
    done = CliRunner().invoke(commands, ["simulate", "--trace", str(root / "examples" / "traces" / "spot-day.csv")])
    assert done.exit_code == 0
    assert f"```text\n{done.output}```" in (root / "docs" / "simulate.md").read_text()


def test_each_cost_counts(tmp_path: Path) -> None:
    """Every flag makes the systems that it concerns worse, and leaves the others alone."""
    usual = {name: system["goodput"] for name, system in as_json(tmp_path)["systems"].items()}
    concerned = {
        "--start-time=60": {"restart", "horovod", "edl_hvd"},
        "--step-time=100s": {"horovod", "edl_hvd"},
        "--restore-cost=60": {"restart"},
        "--resize-cost=60": {"edl_hvd"},
        "--recover-cost=1min": {"edl_hvd"},
        "--follow-time=60": {"edl_hvd"},
        "--copy-cost=60": {"edl_hvd"},
        "--checkpoint-cost=60": {"restart"},  # stock Horovod needs none here, where some host is always left
        "--gloo-timeout=60": {"horovod"},
        "--reset-cost=60": {"horovod"},
        "--checkpoint-every=20s": {"edl_hvd"},
        "--stock-checkpoint-every=10s": {"restart", "horovod"},
        "--notice=5min": {"edl_hvd"},
        "--min-np=3": {"edl_hvd"},
        "--poll=7s": {"horovod", "edl_hvd"},
    }
    for flag, systems in concerned.items():
        now = {name: system["goodput"] for name, system in as_json(tmp_path, flag)["systems"].items()}
        assert {name for name in now if now[name] < usual[name] - 1e-9} == systems, flag


def test_a_part_of_the_trace_and_a_part_of_its_hosts(tmp_path: Path) -> None:
    document = as_json(tmp_path, "--from", "10min", "--until", "30min", "--divide", "2")
    assert document["trace"] == {"seconds": 1200, "most_hosts": 2, "host_seconds": 2 * 600 + 600}


def test_the_faster_the_trace_the_more_the_same_costs_weigh(tmp_path: Path) -> None:
    usual, fast = as_json(tmp_path), as_json(tmp_path, "--speed", "20")
    assert fast["trace"] == {"seconds": 180, "most_hosts": 3, "host_seconds": 480}
    for system in usual["systems"]:
        assert fast["systems"][system]["goodput"] < usual["systems"][system]["goodput"]


def test_costs_come_from_an_event_log_and_flags_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, SystemClock())
    log.emit(Committed(1, 2, 1, 0, 8))
    log.emit(Resized(2, 2, 1, "failure", 0.75, 1))
    log.emit(Resized(3, 1, 2, "change", 0.5, 1))
    log.close()
    costs = as_json(tmp_path, "--costs", str(path), "--resize-cost", "0.1")["costs"]
    assert (costs["recover_s"], costs["resize_s"], costs["start_s"]) == (0.75, 0.1, 2.2)
    assert "recover_s = 0.750 s, median of 1 (resized)" in simulate(tmp_path, "--costs", str(path)).output


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    assert simulate(tmp_path, "--picture", str(tmp_path / "picture.png")).exit_code == 0
    content = (tmp_path / "picture.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[place : place + 4], "big") for place in (16, 20))
    assert (width, height) == (1650, 1125)
    gone = "0,add,a\n600000,remove,a\n1800000,add,b\n3600000,end\n"
    assert simulate(tmp_path, "--picture", str(tmp_path / "gap.png"), trace=gone).exit_code == 0


def test_without_a_picture_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(TRACE)
    program = (
        "import sys; sys.argv = ['edl-hvd', 'simulate', '--trace', sys.argv[1]]\n"
        "from edl_hvd.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'boto3', 'matplotlib', 'numpy', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "spot.csv")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "goodput" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--resize-cost", "soon"], 2, "'soon' is no time; expected one such as '0.3s'"),
        (["--resize-cost", "-1"], 2, "'-1' is no time"),
        (["--checkpoint-every", "5 steps"], 2, "'5 steps' is no time; expected one such as '10min', or 'auto'"),
        (["--step-time", "0"], 1, "--step-time is 0.0 s; expected a time, more than 0"),
        (["--poll", "0"], 1, "--poll is 0 s; expected a time, more than 0"),
        (["--from", "2h"], 1, "the trace ends after 3600 s; there is no part from 7200 s"),
        (["--costs", "no-such-file"], 1, "cannot read the event log no-such-file: No such file"),
        (["--costs", "spot.csv"], 1, "spot.csv is no event log"),
        (["--trace", "no-such-file"], 1, "cannot read the trace no-such-file: No such file"),
        (["--picture", "none/picture.png"], 1, "cannot write the picture none/picture.png: No such file"),
        (["--min-np", "9"], 1, "--min-np is 9, more than the 3 hosts that are ever there at once"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    words: list[str], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = simulate(tmp_path, *words)
    assert done.exit_code == code
    assert told in (done.output if code == 2 else str(done.exception))
