"""What a poll costs: CPU and wall time of every discovery script, asked as Horovod asks.

    python benchmarks/discovery.py [POLLS]

The EC2 line asks moto's server on this machine. Loads of other processes show in the wall time, hardly in the
CPU time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "contract"))

from discovery_clouds import Ec2Scene  # noqa: E402 (no package)
from discovery_scenes import HostsFileScene, Scene, ScheduleScene  # noqa: E402
from servers import AwsServer  # noqa: E402


def measure(command: list[str], environment: dict[str, str], folder: Path, polls: int) -> tuple[float, float, float]:
    """CPU per run in ms (mean), wall time per run in ms (median, largest)."""
    walls_ms = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(polls):
        started_s = time.perf_counter()
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        walls_ms.append(1e3 * (time.perf_counter() - started_s))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e3 * cpu_s / polls, statistics.median(walls_ms), max(walls_ms)


def report(name: str, numbers: tuple[float, float, float]) -> None:
    print(f"{name:34}{numbers[0]:10.1f}{numbers[1]:14.1f}{numbers[2]:14.1f}", flush=True)


def main(polls: int) -> None:
    print(f"{'ms per run, ' + str(polls) + ' runs':34}{'CPU mean':>10}{'wall median':>14}{'wall max':>14}")
    with tempfile.TemporaryDirectory() as name, AwsServer() as aws:
        folders = [Path(name, kind) for kind in ("file", "schedule", "ec2")]
        for folder in folders:
            folder.mkdir()
        bare = [sys.executable, "-I", "-S", "-c", "pass"]
        report("python -I -S -c pass", measure(bare, dict(os.environ), Path(name), polls))
        report(
            "python -I -c 'import boto3'", measure([*bare[:2], "-c", "import boto3"], dict(os.environ), Path(name), 3)
        )
        scenes: list[Scene] = [HostsFileScene(folders[0]), ScheduleScene(folders[1]), Ec2Scene(folders[2], aws)]
        for scene in scenes:
            scene.show(8)
            command = [scene.path(), *scene.words]
            report(f"{scene.script}, first poll", measure(command, scene.environment, scene.folder, 1))
            scene.environment["EDL_HVD_DISCOVERY_REFRESH"] = "1000"  # nothing but warm polls below
            command = [scene.path(), *scene.words]
            subprocess.run(command, env=scene.environment, cwd=scene.folder, check=True, stdout=subprocess.DEVNULL)
            report(f"{scene.script}, later polls", measure(command, scene.environment, scene.folder, polls))
            scene.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
