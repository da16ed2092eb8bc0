"""The benchmark that plays services and training of a production cluster on the same hosts."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODES = "sn,cpu_milli,memory_mib,gpu,model\nplain,32000,262144,0,\na,96000,786432,4,T4\n"
HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
PODS = (
    ("job", 1, "BE", "Failed", 0, 1005, 5),
    ("service", 2, "LS", "Running", 100, 600, 100),
    ("never-scheduled", 1, "LS", "Pending", 120, 500, ""),
    ("without-gpus", 0, "LS", "Running", 130, 500, 130),
    ("large", 4, "LS", "Running", 2000, 2100, 2000),
    ("late-job", 1, "BE", "Running", 1900, 2300, 1900),
    ("another-day", 1, "LS", "Running", 90000, 90010, 90000),
)


def played(folder: Path, *flags: str) -> dict[str, dict[str, str]]:
    (folder / "openb_node_list_all_node.csv").write_text(NODES)
    rows = (
        f"{name},1000,1000,{gpus},1000,,{qos},{phase},{created},{deleted},{scheduled}\n"
        for name, gpus, qos, phase, created, deleted, scheduled in PODS
    )
    (folder / "openb_pod_list_default.csv").write_text(HEAD + "".join(rows))
    words = [sys.executable, str(ROOT / "benchmarks" / "cluster_services.py"), str(folder), str(folder / "out")]
    subprocess.run([*words, "--every", "1", "--days", "0-0", *flags], check=True, capture_output=True)
    with (folder / "out" / "services.csv").open() as file:
        return {row["policy"]: row for row in csv.DictReader(file)}


def test_services_come_first_and_jobs_use_what_they_leave(tmp_path: Path) -> None:
    rows = played(tmp_path)
    assert set(rows) == {"static", "static-most", "elastic", "elastic-known"}
    for row in rows.values():
        assert (row["hosts"], row["gpus"], row["services"], row["jobs"]) == ("1", "4", "2", "2")
        assert row["pending_s"] == "30.0", "each job finds room when it comes"
    # With four GPUs each job is 4 ** 0.8 = 3.03 times as fast.
    static, most, elastic = (rows[name] for name in ("static", "static-most", "elastic"))
    # The large service waits for the second job's 30 + 400 s, or 30 + 400 / 3.03 s, to end, and 2 s to leave.
    assert static["services_longest_s"] == "332.0"
    assert float(most["services_longest_s"]) > 259, "the first one waits for a job with all GPUs"
    assert elastic["services_longest_s"] == rows["elastic-known"]["services_longest_s"] == "2.0"
    assert elastic["services_waited_s"] == "2.0"
    assert (static["stopped"], elastic["stopped"]) == ("0", "1"), "the large one needs the least of the second job"
    assert float(elastic["average_s"]) < float(static["average_s"])


def test_what_was_played_is_not_played_again(tmp_path: Path) -> None:
    first = played(tmp_path, "--policies", "static")
    second = played(tmp_path, "--policies", "static,elastic")
    assert first["static"] == second["static"]
    assert set(second) == {"static", "elastic"}
