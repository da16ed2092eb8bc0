"""How the jobs and claims of a fleet look in a terminal."""

from __future__ import annotations

import time
from pathlib import Path

from edl_hvd.cli.formatting import clean, count, duration, pace, shell_line
from edl_hvd.discovery.watch import SourceTrouble
from edl_hvd.fleet.messages import JobRow
from edl_hvd.fleet.runs import JOBS, OUTPUT
from edl_hvd.fleet.state import FleetJob, HeldClaim, JobPhase, shown_hosts, total

_COLOURS = {"complete": "green", "failed": "bold red", "training": "green", "stopped": "dim"}


def state_of(row: JobRow) -> str:
    """The state of a job in one or two words."""
    job = row.job
    if job.phase is JobPhase.RUNNING:
        return {"training": "training", "finishing": "training"}.get(row.progress.state, "starting")
    if job.phase is JobPhase.WAITING:
        return "waiting" if job.run == 0 else "preempted" if job.preemptions and not job.failures else "waiting again"
    return "saving" if job.phase is JobPhase.STOPPING else str(job.phase)


def job_cells(row: JobRow) -> list[str]:
    """The row of a job in the table of all, with colours: name, state, slots, wants, step, left, speed, waited, why."""
    job, progress, state = row.job, row.progress, state_of(row)
    colour = _COLOURS.get(state, "yellow")
    spec = job.spec
    why = job.why if not job.reason else f"{job.reason}: {job.why}"
    return [
        job.name,
        f"[{colour}]{state}[/]",
        str(total(job.given)),
        f"{spec.least}" if spec.least == spec.most else f"{spec.least} to {spec.most}",
        f"{progress.step:,}" if progress.step > 0 else "",
        "" if progress.left_s is None else duration(progress.left_s),
        "" if progress.samples_per_s is None else f"{progress.samples_per_s:,.0f}",
        duration(row.waited_s),
        clean(why),
    ]


def claim_cells(claim: HeldClaim, now_s: float) -> list[str]:
    """The row of a claim in the same table."""
    until = "" if claim.until_s is None else duration(max(0.0, claim.until_s - now_s))
    waited = duration(claim.whole_s if claim.whole_s is not None else now_s - claim.asked_s)
    state = "[green]claim[/]" if claim.whole_s is not None else "[yellow]claim[/]"
    where = shown_hosts(claim.granted) or clean(claim.why)
    return [claim.name, state, str(total(claim.granted)), str(claim.slots), "", until, "", waited, where]


def trouble_line(trouble: SourceTrouble) -> str:
    """Why the hosts of a fleet are those known before, and since when; not escaped."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - trouble.for_s))
    return f"hosts as they were known before {since} ({duration(trouble.for_s)} ago): {trouble.problem}"


def facts_of(row: JobRow, state: Path) -> list[tuple[str, str]]:
    """Labels and texts of one job; ``state`` is the folder of the fleet."""
    job, progress = row.job, row.progress
    spec = job.spec
    folder = state / JOBS / job.name
    facts = [
        ("job", job.name),
        ("command", shell_line(spec.command)),
        ("state", f"{state_of(row)}{f': {job.why}' if job.why else ''}"),
        ("slots", f"{total(job.given)} of {spec.least} to {spec.most} on {shown_hosts(job.given) or 'no host'}"),
        (
            "priority",
            f"{spec.priority} in queue {spec.queue}{'' if spec.preemptible else ', never stopped for others'}",
        ),
    ]
    if spec.family:
        facts.append(("family", f"{spec.family}; measured {count(len(job.timings), 'kind')} of steps itself"))
    if job.given:
        numbers = " · ".join(f"{entry.host}: {' '.join(map(str, entry.devices))}" for entry in job.listed)
        facts.append(("devices", f"{numbers} (CUDA_VISIBLE_DEVICES, one for each worker)"))
    if progress.step > 0:
        speed = "" if progress.samples_per_s is None else f", {pace(progress.samples_per_s)}"
        saved = f", checkpoint {progress.saved_step:,}" if progress.saved_step >= 0 else ""
        facts.append(("step", f"{progress.step:,}{speed}{saved}"))
    if progress.left_s is not None:
        facts.append(("left", duration(progress.left_s)))
    if job.curve is not None:
        points = (f"{size}: {value:,.0f}" for size, value in zip(job.curve.sizes, job.curve.goodput, strict=True))
        facts.append(("curve", f"goodput by slots: {', '.join(points)}"))
    facts += [
        ("waited", f"{duration(row.waited_s)}; first step {_first_step(job)}"),
        ("served", f"{row.served_slot_s:,.0f} slot-seconds, {count(job.resizes, 'resize')}, "
                   f"{count(job.preemptions, 'preemption')}, {count(job.run, 'run')}"),
        ("folder", str(folder)),
        ("output", str(folder / OUTPUT)),
    ]  # fmt: skip
    return facts


def _first_step(job: FleetJob) -> str:
    return "not yet" if job.first_step_s is None else f"after {job.first_step_s:.1f} s"
