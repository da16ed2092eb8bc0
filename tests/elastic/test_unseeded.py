"""What a script draws that seeds nothing is the same on all workers of a job, newcomers too, and other in each job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import LONG_S

HERE = Path(__file__).parent
EDLRUN = str(Path(sys.executable).with_name("edlrun"))


def drawn_in_a_job(folder: Path, size: int, **variables: str) -> dict[str, Any]:
    """What each worker has drawn, in a job that two workers start and that goes on until there are ``size``."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1", **variables}
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    done = subprocess.run(
        [EDLRUN, "-np", "2", "--min-np", "2", "--max-np", str(size), "--discover", f"file:{hosts}",
         "--output-filename", str(folder / "output"),
         sys.executable, str(HERE / "unseeded_script.py"), str(hosts), str(size)],
        env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = [line for file in (folder / "output").rglob("stdout") for line in file.read_text().splitlines()]
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(said) == size, done.stdout
    return {one["worker"]: one["drawn"] for one in said}


def test_workers_and_a_newcomer_draw_the_same_and_another_job_draws_otherwise(tmp_path: Path) -> None:
    first, *others = drawn_in_a_job(tmp_path / "one", 3).values()
    assert others == [first, first]
    again, other = drawn_in_a_job(tmp_path / "two", 2).values()
    assert again == other
    assert not [name for name in first if first[name] == other[name]]


def test_a_hash_seed_of_the_user_stays(tmp_path: Path) -> None:
    asked = {drawn["vocabulary"][0] for drawn in drawn_in_a_job(tmp_path, 2, PYTHONHASHSEED="7").values()}
    plain = subprocess.run(
        [sys.executable, "-c", "print(list({f'word {number}' for number in range(40)})[0])"],
        env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked == {plain.stdout.strip()}
