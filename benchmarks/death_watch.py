"""How long after SIGKILL a process is missed: by a connection that is held for that, and by one of its own.

    python benchmarks/death_watch.py [--megabytes 1 100 1000] [--runs 20] [--load 0]

The process has imported torch and Horovod and holds that much memory besides. The system frees all of it before it ends
the connections that the process itself has. Two connections are held by threads with a table of descriptors of their
own; the first of them to end counts.
"""

from __future__ import annotations

import argparse
import select
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from loads import loaded
from watched_process import Watched


def kill_one(megabytes: int) -> tuple[float, float]:
    """Seconds until a held connection has ended, and until its own has."""
    one = Watched(megabytes)
    began_s = time.monotonic()
    one.process.kill()
    select.select(one.watches, [], [])
    missed_s = time.monotonic() - began_s
    one.own.recv(1)
    ended_s = time.monotonic() - began_s
    one.close()
    return missed_s, ended_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100, 1000], help="held (default 1 100 1000)")
    parser.add_argument("--runs", type=int, default=20, help="processes of each size (default 20)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside them (default 0)")
    arguments = parser.parse_args()
    with loaded(arguments.load):
        print(f"{'milliseconds':<14}{'held: median':>14}{'worst':>8}{'own: median':>14}{'worst':>8}")
        for megabytes in arguments.megabytes:
            missed, ended = zip(*(kill_one(megabytes) for _ in range(arguments.runs)), strict=True)
            held, own = ([1e3 * statistics.median(found), 1e3 * max(found)] for found in (missed, ended))
            print(f"{megabytes:>11} MB{held[0]:>14.1f}{held[1]:>8.1f}{own[0]:>14.1f}{own[1]:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
