"""Two real jobs on four slots, shared by the fleet and as gangs; and how long a claim waits for its slots.

    python benchmarks/two_jobs.py [--epochs 8] [--claims 20]

The second job is submitted when the first has made its first step. As gangs, each job runs with all of its workers or
not at all: of three (then one slot of four is idle, and the second job waits), or of four. The work of a step is
waiting, so that it scales with the workers on any machine; starting processes is not. A claim of two slots is made
again and again while both jobs train, and given back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "elastic"))
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

from fleet_daemon import FleetDaemon  # noqa: E402

from edl_hvd.fleet.messages import (  # noqa: E402
    Agreed,
    ClaimRequest,
    FleetView,
    JobRow,
    ReleaseRequest,
    ViewRequest,
    call,
)

SLOTS = 4
WAYS = {"shared, 1 to 4 each": (1, 4), "gangs of 3": (3, 3), "gangs of 4": (4, 4)}


@dataclass(frozen=True)
class Round:
    """Two jobs from the first submission to the end of both.

    Attributes:
        makespan_s: Until the end of both.
        first_s: From the submission of the first job to its first step.
        second_s: The same of the second.
    """

    makespan_s: float
    first_s: float
    second_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="of each job, 15 steps each (default 8)")
    parser.add_argument("--claims", type=int, default=20, help="claims, one after the other (default 20)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each way (default 1)")
    arguments = parser.parse_args()
    print(f"{'':<22}{'makespan':>10}{'first step':>12}{'of the second':>15}")
    found: dict[str, list[Round]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):  # side by side: the machine may be busy at one time and not at another
        for way, (least, most) in WAYS.items():
            found[way].append(play(least, most, arguments.epochs))
            last = found[way][-1]
            print(f"{way:<22}{last.makespan_s:>8.1f} s{last.first_s:>10.1f} s{last.second_s:>13.1f} s", flush=True)
    shared, *gangs = ((way, statistics.median(one.makespan_s for one in rounds)) for way, rounds in found.items())
    for way, makespan_s in gangs:
        print(f"shared in {shared[1] / makespan_s:.2f} of the time of {way}")
    waits = claims(arguments.claims)
    print(f"{len(waits)} claims of two slots: median {statistics.median(waits):.2f} s, worst {max(waits):.2f} s; "
          f"{sum(wait <= 1.5 for wait in waits)} within 1.5 s")  # fmt: skip


def play(least: int, most: int, epochs: int) -> Round:
    """Both jobs with this number of slots each."""
    with tempfile.TemporaryDirectory() as folder, FleetDaemon(Path(folder), hosts=(f"localhost:{SLOTS}",)) as fleet:
        began_s = time.monotonic()
        submit(fleet, "first", least, most, epochs)
        fleet.until(lambda: rows(fleet)["first"].job.first_step_s is not None)
        submit(fleet, "second", least, most, epochs)
        fleet.until(lambda: all(row.job.phase == "complete" for row in rows(fleet).values()))
        first_s, second_s = (rows(fleet)[name].job.first_step_s or 0.0 for name in ("first", "second"))
        return Round(time.monotonic() - began_s, first_s, second_s)


def claims(count: int) -> list[float]:
    """Seconds that each claim of two slots waited, beside two jobs that train."""
    found = []
    with tempfile.TemporaryDirectory() as folder, FleetDaemon(Path(folder), hosts=(f"localhost:{SLOTS}",)) as fleet:
        for name in ("first", "second"):
            submit(fleet, name, 1, SLOTS, 10_000)
        for number in range(count):
            fleet.until(lambda: sum(row.progress.workers for row in rows(fleet).values()) == SLOTS)
            name = f"web{number}"
            reply = call(fleet.state, ClaimRequest(name, 2, 1000, None))
            assert isinstance(reply, Agreed), reply
            fleet.until(lambda name=name: whole_s(fleet, name) is not None)
            found.append(whole_s(fleet, name) or 0.0)
            call(fleet.state, ReleaseRequest(name))
    return found


def view(fleet: FleetDaemon) -> FleetView:
    """How the fleet stands, asked by this process: a command per question would be a load of its own."""
    reply = call(fleet.state, ViewRequest())
    assert isinstance(reply, FleetView), reply
    return reply


def rows(fleet: FleetDaemon) -> dict[str, JobRow]:
    """The jobs by name."""
    return {row.job.name: row for row in view(fleet).jobs}


def whole_s(fleet: FleetDaemon, claim: str) -> float | None:
    """Seconds until a claim had all of its slots, by the daemon's clock."""
    return next(one.whole_s for one in view(fleet).claims if one.name == claim)


def submit(fleet: FleetDaemon, name: str, least: int, most: int, epochs: int) -> None:
    """Submit a training of the demo's."""
    script = str(REPOSITORY / "examples" / "cluster" / "train.py")
    command = (sys.executable, script, "--epochs", str(epochs), "--work", "0.2")
    fleet.submit(name, "--min", str(least), "--max", str(most), command=command)


if __name__ == "__main__":
    main()
