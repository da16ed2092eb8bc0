"""What a worker's start takes until it has made its first optimizer step, with torch's compiler and without.

    python benchmarks/start.py [--turns 7]

New processes, in turn: one that imports torch and edl_hvd, calls ``edl_hvd.init()`` and makes a step of SGD, and one
that imports torch's compiler before ``init()``, as the first optimizer would have done. Medians, in seconds from the
beginning of the script; the processor's time beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

SCRIPT = """
import json, time
began_s, used_s = time.perf_counter(), time.process_time()
import torch
torch.set_num_threads(1)
imported_s = time.perf_counter() - began_s
import edl_hvd
{first}
edl_hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print(json.dumps([imported_s, time.perf_counter() - began_s, time.process_time() - used_s]))
"""
KINDS = {"with the compiler": "import torch._dynamo", "edl_hvd.init()": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="processes of each kind (default 7)")
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for turn in range(arguments.turns + 1):
        for kind, first in KINDS.items():
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT.format(first=first)], check=True, stdout=subprocess.PIPE
            )
            if turn:  # the first reads files that the next ones find in memory
                found[kind].append(json.loads(done.stdout))
    print(f"{'':<20}{'torch':>8}{'a step':>8}{'processor':>11}")
    steps_s = {}
    for kind, rows in found.items():
        torch_s, steps_s[kind], used_s = map(statistics.median, zip(*rows, strict=True))
        print(f"{kind:<20}{torch_s:>8.2f}{steps_s[kind]:>8.2f}{used_s:>11.2f}")
    with_it_s, without_s = steps_s.values()
    print(f"a start takes {without_s / with_it_s:.2f} times as long")


if __name__ == "__main__":
    main()
