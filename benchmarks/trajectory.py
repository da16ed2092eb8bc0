"""Draws what an elastic, an exact and a fixed run learn over each other, and says how far apart they are.

    python benchmarks/trajectory.py [--network relu] [--output runs/trajectory]

Handwritten digits, a small ResNet with BatchNorm, dropout and augmentation, under ``edlrun``: 1 → 3 → 2 → 4 → 1
workers, one of three and three of four ended by SIGKILL. The fixed runs are one process without a launcher. The table
tells the largest difference between the losses of a step, relative, and the hash of parameters, buffers and optimizer
state at the end.

With ``--network relu`` the ordinary sum comes apart: a unit whose input is nearly zero is on in one run and off in the
other, and from then on they train on slightly different gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

ELASTIC = Path(__file__).resolve().parents[1] / "tests" / "elastic"
sys.path.insert(0, str(ELASTIC))

import harness  # noqa: E402
from training import Training  # noqa: E402
from trajectory import FAULTS, SCRIPT, run_alone, steps_of  # noqa: E402

TRAINING = Training(samples=480, epochs=20, global_batch=48, micro_batch=8, until_size=1, pause_s=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["smooth", "relu"], default="smooth", help="its activations")
    parser.add_argument("--output", type=Path, default=Path("runs/trajectory"), help="folder for what it writes")
    options = parser.parse_args()
    matplotlib.use("Agg")
    shutil.rmtree(options.output, ignore_errors=True)
    figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True, height_ratios=(2, 1), layout="constrained")
    print(f"{'sum':9} {'steps':>6} {'largest difference, steps 1 to 200':>35} {'to the end':>11}   hashes")
    for kind, colour in (("ordinary", "tab:orange"), ("exact", "tab:blue")):
        extra = (("exact",) if kind == "exact" else ()) + ((options.network,) if options.network == "relu" else ())
        training = dataclasses.replace(TRAINING, extra=extra)
        job = harness.Job(
            hosts=("localhost:1",), np=1, faults=FAULTS, training=training, launcher="edlrun", script=SCRIPT
        )
        elastic = harness.run(job, options.output / f"{kind}-elastic")
        if elastic.exit_code != 0:
            sys.exit(f"the {kind} elastic run failed:\n{elastic.output[-4000:]}")
        fixed = run_alone(training, elastic.reports[0]["epoch"], options.output / f"{kind}-fixed")
        pairs = list(zip(steps_of(elastic), steps_of(fixed), strict=True))
        apart = [abs(one.loss - other.loss) / other.loss for one, other in pairs]
        hashes = [outcome.reports[0]["sha256"][:12] for outcome in (elastic, fixed)]
        same = "one: " + hashes[0] if len(set(hashes)) == 1 else "two: " + ", ".join(hashes)
        print(f"{kind:9} {len(pairs):6} {max(apart[:200]):35.1e} {max(apart):11.1e}   {same}", flush=True)
        axes[0].plot([one.loss for one, _ in pairs], color=colour, label=f"{kind}, elastic")
        axes[0].plot([other.loss for _, other in pairs], "--", color=colour, alpha=0.6, label=f"{kind}, one process")
        axes[1].semilogy([max(value, 1e-9) for value in apart], color=colour, label=kind)
        for line in elastic.lines("enter"):
            if kind == "exact" and line["rank"] == 0 and line["step"]:
                axes[0].axvline(line["step"], color="0.8", zorder=0)
                axes[0].annotate(f"{line['size']}", (line["step"], axes[0].get_ylim()[1]), va="top", fontsize=8)
    axes[0].set_ylabel("loss of a step")
    axes[1].set(xlabel="step", ylabel="relative difference\nto one process (1e-9: none)")
    axes[0].legend()
    axes[1].legend()
    figure.savefig(options.output / "trajectory.png", dpi=120)
    print(f"\nPicture  {options.output / 'trajectory.png'}")


if __name__ == "__main__":
    main()
