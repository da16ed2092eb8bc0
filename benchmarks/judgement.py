"""Whether a job recovered, in the few words of a table's cell."""

from __future__ import annotations

from harness import Job, Outcome
from invariants import check_counters, check_ledger, check_no_step_lost, check_replicas

# Between two checkpoints of ``fault_cases.py`` or two snapshots of ``torchrun_script.py``, and the step in flight.
MOST_STEPS_LOST = 6


def judge(job: Job, outcome: Outcome) -> str:
    """What is wrong with the job that ended by itself; nothing if it recovered."""
    if outcome.exit_code != 0:
        return f"job ends (exit code {outcome.exit_code})"
    planned = {number: getattr(fault, "times", 1) for number, fault in enumerate(job.faults)}
    if outcome.fired != planned:
        return f"faults struck {outcome.fired}, planned were {planned}"
    found = [_fell_back(outcome)] if _fell_back(outcome) else _wrong_results(job, outcome)
    if job.engine == "edl_hvd" and aborts(outcome):
        found.append(aborts(outcome))
    if outcome.left:
        found.append(f"{len(outcome.left)} processes are left")
    return "; ".join(found)


def aborts(outcome: Outcome) -> str:
    """Whether workers ended in C++, as the launchers tell it; stock jobs often survive that."""
    words = ("exit with status code 134", "exit code = 134", "SIGABRT")
    return "a worker aborts (134)" if any(word in outcome.output for word in words) else ""


def _fell_back(outcome: Outcome) -> str:
    highest = 0
    for line in outcome.trace:
        if line["what"] == "step":
            highest = max(highest, line["step"])
        if line["what"] == "enter" and line["step"] < highest - MOST_STEPS_LOST:
            return f"wrong result: trains on from step {line['step']} after {highest}"
    return ""


def _wrong_results(job: Job, outcome: Outcome) -> list[str]:
    checks = {
        "replicas differ": lambda: check_replicas(outcome),
        "committed steps are lost": lambda: check_no_step_lost(job, outcome),
        "samples do not count once": lambda: check_ledger(job, outcome),
    }
    if job.engine == "edl_hvd":
        checks["counters disagree"] = lambda: check_counters(job.training, outcome)
    found = []
    for name, check in checks.items():
        try:
            check()
        except AssertionError:
            found.append(f"wrong result: {name}")
    return found


def judge_restarts(outcome: Outcome) -> tuple[str, int]:
    """The same for ``torchrun``, whose workers start again; and how many steps were done twice."""
    if outcome.exit_code != 0:
        return f"job ends (exit code {outcome.exit_code})", 0
    if not outcome.fired:
        return "the fault did not strike", 0
    steps = [line["step"] for line in outcome.lines("step") if line["rank"] == 0]
    return _fell_back(outcome), len(steps) - len(set(steps))
