"""``edl-hvd simulate cluster``: many jobs on one cluster under several policies."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from edl_hvd.cli.checkpoint_common import bar, print_table
from edl_hvd.cli.formatting import count, duration
from edl_hvd.errors import UsageError

if TYPE_CHECKING:
    from edl_hvd.simulator.cluster.play import Played, Setting


@click.command("cluster")
@click.option("--workload", "path", required=True, type=click.Path(path_type=Path), metavar="FILE.csv",
              help="Jobs: name, time, application, num_replicas, batch_size, as in Pollux's artifact; or a recorded "
                   "trace: job_id, submission_time, duration, num_gpu, as in ElasticFlow's.")  # fmt: skip
@click.option("--profiles", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Profiles of the applications. [profiles, beside the folder of the workload]")  # fmt: skip
@click.option("--law", metavar="P|pollux",
              help="Recorded trace: n GPUs are n^P times as fast as one; or speeds of Pollux's applications, drawn by "
                   "GPU-hours. [0.85]")  # fmt: skip
@click.option("--stretch", type=click.FloatRange(min=1), metavar="N",
              help="Recorded trace: most GPUs of a job, by those that it ran on. [4]")  # fmt: skip
@click.option("--policy", "names", default="ranked,ranked-blind,fifo", metavar="NAME,...",
              help="Policies: ranked, ranked-blind, ranked-undamped, ranked-short-first, "
                   "ranked-doubling, fifo, fifo-backfill, fulfilment, tiresias, optimus, max-min, afs-l; and where "
                   "jobs of one application share what they measure: ranked-families, ranked-blind-families, "
                   "max-min-families, afs-l-families. "
                   "[ranked,ranked-blind,fifo]")  # fmt: skip
@click.option("--costs", type=click.Choice(["equal", "own"]), default="equal",
              help="equal: those of Pollux's artifact, 30 s for each change and a decision per minute; "
                   "own: 1 s, while newcomers start for 30 s, and a decision every 10 s. [equal]")  # fmt: skip
@click.option("--hosts", type=click.IntRange(min=1), default=16, metavar="N", help="Hosts. [16]")
@click.option("--slots", type=click.IntRange(min=1), default=4, metavar="N",
              help="GPUs of each host; at most 4 with profiles. [4]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--picture", metavar="FILE.png", help="Draw the GPUs of each job over time in this file.")
def simulate_cluster_command(
    path: Path, profiles: Path | None, law: str | None, stretch: float | None, names: str, costs: str, hosts: int,
    slots: int, as_json: bool, picture: str | None,
) -> None:  # fmt: skip
    """Compare completion times of many jobs on one cluster.

    'ranked' is the planner of 'edl-hvd fleet' itself, in virtual time. What each policy is told stands beside it:
    results of those that know more are not comparable.

    \b
    Examples:
      edl-hvd simulate cluster --workload workloads/workload-6.csv
      edl-hvd simulate cluster --workload w.csv --policy ranked,tiresias
      edl-hvd simulate cluster --workload w.csv --costs own --picture w.png
      edl-hvd simulate cluster --workload trace.csv --hosts 96 --slots 8

    Documents: docs/cluster_experiments.md.
    """
    _check_packages()
    from edl_hvd.simulator.cluster.play import EQUAL_COSTS, OWN_COSTS
    from edl_hvd.simulator.cluster.recorded import is_recorded

    chosen = _known_policies(names)
    setting = replace(EQUAL_COSTS if costs == "equal" else OWN_COSTS, hosts=hosts, host_slots=slots)
    assumed = ""
    if is_recorded(path):
        if picture is not None:
            raise UsageError(f"--picture draws every moment, and {path} may have months of them; expected none with it")
        law, stretch = law or "0.85", stretch or 4.0
        results = _play_trace(path, profiles, law, stretch, chosen, setting)
        assumed = (
            f"Assumed, and told to all that share GPUs: speeds by the law {law}, "
            f"up to {stretch:g} times a job's GPUs. A decision a minute at most."
        )
    else:
        if law is not None or stretch is not None:
            raise UsageError(
                f"--law and --stretch are for recorded traces, and {path} is none; expected a file with the column "
                "job_id, or neither of them"
            )
        results = _play_workload(path, profiles, chosen, setting)
    if picture is not None:
        from edl_hvd.simulator.cluster.picture import draw_slots

        what = f"{count(len(results[0].jobs), 'job')}, {count(hosts * slots, 'GPU')}"
        draw_slots(results, picture, f"{path.stem}: {what}, {costs} costs")
    if as_json:
        click.echo(json.dumps([_plain(result) for result in results], indent=2))
        return
    print_table(_table(results))
    if assumed:
        click.echo(assumed)


def _check_packages() -> None:
    """Refuse to simulate where a package is missing that no other command needs."""
    try:
        importlib.import_module("edl_hvd.simulator.cluster.play")
    except ImportError as error:
        raise UsageError(
            f"simulating a cluster needs {error.name}; install it with: pip install 'edl-hvd[simulate]'"
        ) from error


def _known_policies(names: str) -> list[str]:
    """The names in a list with commas."""
    from edl_hvd.simulator.cluster.policies.by_name import POLICIES

    chosen = names.split(",")
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown:
        raise UsageError(f"policy {unknown[0]!r} is not known; expected some of {', '.join(POLICIES)}")
    return chosen


def _play_trace(
    path: Path, profiles: Path | None, law: str, stretch: float, names: Sequence[str], setting: Setting
) -> list[Played]:
    """What comes out of a recorded trace under each policy."""
    from edl_hvd.simulator.cluster.policies.by_name import POLICIES
    from edl_hvd.simulator.cluster.recorded import elastic, law_named, read_rows
    from edl_hvd.simulator.cluster.recorded_play import play_recorded

    gpus = setting.hosts * setting.host_slots
    workload = elastic(path.stem, read_rows(path), law_named(law, profiles), gpus, setting.host_slots, stretch)
    setting = replace(setting, period_s=60.0)
    results = []
    for name in names:
        with bar(name, "jobs") as tell:
            results.append(play_recorded(workload, POLICIES[name](), setting, tell=tell).played)
    return results


def _play_workload(path: Path, profiles: Path | None, names: Sequence[str], setting: Setting) -> list[Played]:
    """What comes out of jobs with profiles under each policy."""
    from edl_hvd.simulator.cluster.jobs import Models
    from edl_hvd.simulator.cluster.play import play
    from edl_hvd.simulator.cluster.policies.by_name import POLICIES
    from edl_hvd.simulator.cluster.workload import read_workload

    if setting.host_slots > 4:
        raise UsageError(
            f"profiles tell of hosts with up to 4 GPUs, and --slots is {setting.host_slots}; expected 1 to 4"
        )
    workload = read_workload(path, profiles)
    models: Models = {}
    results = []
    for name in names:
        with bar(name, "jobs") as tell:
            results.append(play(workload, POLICIES[name](), setting, tell, models))
    return results


def _table(results: Sequence[Played]) -> Table:
    from edl_hvd.simulator.cluster.policies.by_name import KNOWS

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("policy", "mean completion", "p99", "makespan", "until first GPUs", "changes per job", "is told"):
        table.add_column(column, justify="left" if column in ("policy", "is told") else "right")
    for result in results:
        times = (result.average_s, result.p99_s, result.makespan_s, result.waited_s)
        table.add_row(
            result.policy, *(duration(time_s) for time_s in times), f"{result.changes:.1f}", KNOWS[result.policy]
        )
    return table


def _plain(result: Played) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "average_s": result.average_s,
        "p99_s": result.p99_s,
        "makespan_s": result.makespan_s,
        "waited_s": result.waited_s,
        "changes": result.changes,
        "jobs": [
            {"name": job.name, "submitted_s": job.submitted_s, "waited_s": job.waited_s,
             "completion_s": job.completion_s, "changes": job.changes, "gpu_s": job.gpu_s}
            for job in result.jobs
        ],
    }  # fmt: skip
