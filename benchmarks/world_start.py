"""How long a world takes to form, from the moment when all its members are told of it until all have summed once.

    python benchmarks/world_start.py [--ranks 2 3 4] [--worlds 100] [--deaths 0] [--strangers] [--load 0]

Ranks are processes of this machine that start one world after the other, as workers do. Each size is measured twice: as
the mended Horovod starts (one mesh, whose addresses travel in one request) and in the order of the release (a mesh for
each of its contexts, whose members ask for one address after the other).

With ``--deaths`` one rank is killed at a random moment while a world forms, that many times; the others are told, as a
driver would, and form the next world with a newcomer in its place. Counted is the time from the death until that world
has formed. "run anew" counts processes that did not survive the death of another.

With ``--strangers`` another process connects to whatever port of the ranks listens, and is silent or sends garbage.
It looks for ports a thousand times a second on the same cores; so beside it stand worlds next to a process that looks
as often, and connects to none.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from bare_worlds import Worlds, strangers
from loads import loaded


@dataclass(frozen=True)
class Start:
    """What the start of a world took, in seconds: until all have summed once, Horovod's start alone, and leaving it."""

    formed_s: float
    horovod_s: float
    left_s: float


def starts(size: int, worlds: int, as_released: bool) -> list[Start]:
    members = Worlds(size, as_released)
    took = []
    for _ in range(worlds):
        began_s = members.begin()
        formed_s = members.formed_at() - began_s
        took.append(Start(formed_s, members.started_after_s, members.leave()))
    members.close()
    return took[1:]  # the first loads libraries


def formed(found: list[Start]) -> list[float]:
    return [start.formed_s for start in found]


def deaths(size: int, count: int, usual_s: float) -> tuple[list[float], int]:
    """Seconds until the next world has formed, and how many others ended."""
    members = Worlds(size)
    took, ended = [], 0
    chance = random.SystemRandom()
    while len(took) < count:
        members.begin()
        members.formed_at()
        members.leave()
        members.begin(sums=False)
        time.sleep(chance.uniform(0, usual_s))
        died_s = time.monotonic()
        ended += members.kill(chance.randrange(size))
        members.begin()
        took.append(members.formed_at() - died_s)
        members.leave()
    members.close()
    return took, ended


def show(name: str, seconds: list[float]) -> None:
    cut = statistics.quantiles(seconds, n=20) if len(seconds) > 1 else seconds * 20
    print(
        f"{name:<34}{1e3 * statistics.median(seconds):>9.1f}{1e3 * cut[-1]:>9.1f}{1e3 * max(seconds):>9.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="sizes of worlds (default 2 3 4)")
    parser.add_argument("--worlds", type=int, default=100, help="of each size (default 100)")
    parser.add_argument("--deaths", type=int, default=0, help="while a world forms, of each size (default 0)")
    parser.add_argument("--strangers", action="store_true", help="connect to every port that listens")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside them (default 0)")
    arguments = parser.parse_args()
    with loaded(arguments.load):
        print(f"{'':<34}{'median':>9}{'95 %':>9}{'worst':>9}")
        for size in arguments.ranks:
            found = starts(size, arguments.worlds, as_released=False)
            mended = formed(found)
            show(f"{size} ranks, mended", mended)
            show("  of which Horovod's start", [start.horovod_s for start in found])
            show("  leaving it", [start.left_s for start in found])
            released = formed(starts(size, arguments.worlds, as_released=True))
            show(f"{size} ranks, in the release's order", released)
            print(f"{'':<34}{statistics.median(released) / statistics.median(mended):>9.1f} times")
            if arguments.strangers:
                with strangers(connect=False):
                    watched = formed(starts(size, arguments.worlds, as_released=False))
                show(f"{size} ranks, mended, only watched", watched)
                with strangers() as connections:
                    disturbed = formed(starts(size, arguments.worlds, as_released=False))
                show(f"{size} ranks, mended, strangers", disturbed)
                ratios = [statistics.median(disturbed) / statistics.median(other) for other in (mended, watched)]
                print(f"{'':<34}{ratios[0]:>9.1f} times, {ratios[1]:.1f} times that of watched ones, "
                      f"{len(connections)} connections of strangers")  # fmt: skip
            if arguments.deaths:
                took, ended = deaths(size, arguments.deaths, 2 * statistics.median(mended))
                show(f"{size} ranks, {arguments.deaths} deaths", took)
                print(f"{'':<34}{ended:>9} run anew")


if __name__ == "__main__":
    main()
