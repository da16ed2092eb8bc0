"""What Prometheus reads of a job, of a fleet and of an operator, in its text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from edl_hvd.driver.status import JobState, Status
from edl_hvd.errors import PlatformError
from edl_hvd.fleet.messages import FleetView
from edl_hvd.fleet.state import JobPhase, total
from edl_hvd.kubernetes.action_runner import DELAY_BOUNDS_S
from edl_hvd.kubernetes.operator import OperatorView
from edl_hvd.kubernetes.parsing import epoch_s
from edl_hvd.kubernetes.snapshot import SeenJob
from edl_hvd.status_server import Document


def check_prometheus() -> None:
    """Refuse at the start what would fail at the first scrape.

    Raises:
        PlatformError: The package that writes the text is missing.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise PlatformError("metrics need the package prometheus-client; pip install 'edl-hvd[metrics]'") from error


class _Metrics:
    """Families of samples, and their text."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry

        self._families: list[object] = []
        self._registry = CollectorRegistry(auto_describe=False)

    def add(
        self, name: str, meaning: str, samples: Iterable[tuple[tuple[str, ...], float | None]],
        labels: tuple[str, ...] = (), counter: bool = False,
    ) -> None:  # fmt: skip
        """One family; samples are label values, in the order of ``labels``, and a value, ``None`` for not known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if counter else GaugeMetricFamily
        family = kind(f"edl_hvd_{name}", meaning, labels=labels)
        for values, value in samples:
            if value is not None:
                family.add_metric(values, value)
        self._families.append(family)

    def add_histogram(self, name: str, meaning: str, counts: Mapping[float, int], bounds: Sequence[float],
                      sum_value: float) -> None:  # fmt: skip
        """One family of durations: how many lie above each bound but the last, and not above the next."""
        from prometheus_client.core import HistogramMetricFamily

        family, total, buckets = HistogramMetricFamily(f"edl_hvd_{name}", meaning), 0, []
        for bound in (*bounds, float("inf")):
            total += counts.get(bound, 0)
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", total))
        family.add_metric((), buckets, sum_value)
        self._families.append(family)

    def collect(self) -> Iterable[object]:
        """For the registry."""
        return self._families

    def document(self) -> Document:
        """The text of all of them."""
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        self._registry.register(self)  # type: ignore[arg-type]
        return Document(generate_latest(self._registry).decode(), CONTENT_TYPE_PLAIN_0_0_4)


def job_metrics(status: Status) -> Document:
    """How one job stands."""
    progress, work, metrics = status.progress, status.work, _Metrics()
    metrics.add("state", "1 for the state of the job",
                (((name,), float(name == status.state)) for name in get_args(JobState)), ("state",))  # fmt: skip
    states = Counter(one.state for one in status.workers)
    metrics.add(
        "workers", "Workers by state", (((name,), number) for name, number in sorted(states.items())), ("state",)
    )
    metrics.add("world_size", "Members of the present world", [((), status.size)])
    metrics.add("generation", "Worlds so far", [((), status.generation)])
    metrics.add("step", "Optimizer steps of the whole run", [((), progress.step)])
    metrics.add("samples", "Samples of the whole run", [((), progress.samples)])
    metrics.add("samples_per_second", "Samples per second, of late", [((), progress.samples_per_s)])
    saved = progress.saved_step if progress.saved_step >= 0 else None
    metrics.add("checkpoint_step", "Step of the newest checkpoint", [((), saved)])
    metrics.add("checkpoint_age_seconds", "Since the newest checkpoint", [((), progress.saved_age_s)])
    metrics.add("work_left_samples", "Samples left of state.epochs(N)", [((), work.left)])
    metrics.add("resize_seconds", "What another number of workers costs, in the median", [((), work.change_s)])
    curve = work.curve
    points = [] if curve is None else zip(curve.sizes, curve.goodput, strict=True)
    metrics.add("goodput", "Samples per second by number of workers, as measured and modelled",
                (((str(size),), value) for size, value in points), ("workers",))  # fmt: skip
    metrics.add("quarantined_hosts", "Hosts that get no workers for now", [((), len(status.quarantined))])
    return metrics.document()


def fleet_metrics(view: FleetView) -> Document:
    """How a fleet stands."""
    metrics, jobs = _Metrics(), view.jobs
    given, granted = sum(total(row.job.given) for row in jobs), sum(total(claim.granted) for claim in view.claims)
    slots = {"jobs": given, "claims": granted, "free": view.free}
    metrics.add("slots", "Slots by who has them", (((who,), count) for who, count in slots.items()), ("holder",))
    metrics.add("slots_lacking", "Slots that more hosts would be used for", [((), view.lacking)])
    metrics.add("hosts", "Hosts of the source", [((), len(view.hosts))])
    phases = Counter(row.job.phase for row in jobs)
    metrics.add("jobs", "Jobs by phase", (((str(phase),), phases[phase]) for phase in JobPhase), ("phase",))

    def of_jobs(name: str, meaning: str, values: Iterable[float | None], counter: bool = False) -> None:
        samples = (((row.job.name,), value) for row, value in zip(jobs, values, strict=True))
        metrics.add(name, meaning, samples, ("job",), counter)

    of_jobs("job_slots", "Slots that a job has", (total(row.job.given) for row in jobs))
    of_jobs("job_slots_least", "Fewest slots that it runs with", (row.job.spec.least for row in jobs))
    of_jobs("job_slots_most", "Most slots that it may have", (row.job.spec.most for row in jobs))
    of_jobs("job_step", "Furthest step", (max(0, row.progress.step) for row in jobs))
    of_jobs("job_samples_per_second", "Samples per second, of late", (row.progress.samples_per_s for row in jobs))
    of_jobs("job_left_seconds", "Until its end, with its present slots", (row.progress.left_s for row in jobs))
    of_jobs("job_waited_seconds", "Time without a run that it wanted", (row.waited_s for row in jobs), counter=True)
    of_jobs("job_served_slot_seconds", "Slots times seconds", (row.served_slot_s for row in jobs), counter=True)
    of_jobs("job_runs", "Times that it was started", (row.job.run for row in jobs), counter=True)
    of_jobs("job_resizes", "Changes of its slots while it ran", (row.job.resizes for row in jobs), counter=True)
    of_jobs("job_preemptions", "Times that it was stopped for another", (row.job.preemptions for row in jobs),
            counter=True)  # fmt: skip
    claims = view.claims
    metrics.add("claim_slots", "Slots that are free for a claim", (((one.name,), total(one.granted)) for one in claims),
                ("claim",))  # fmt: skip
    metrics.add("claim_wait_seconds", "From a claim until it had its slots, or until now",
                (((one.name,), view.now_s - one.asked_s if one.whole_s is None else one.whole_s) for one in claims),
                ("claim",))  # fmt: skip
    return metrics.document()


_JOB_PHASES = ("Waiting", "Starting", "Training", "Suspending", "Suspended", "Rejected", "Complete", "Failed")


def operator_metrics(view: OperatorView) -> Document:
    """How an operator, and the jobs of its cluster, stand; jobs and nodes only while it acts."""
    metrics, jobs = _Metrics(), view.jobs if view.is_leader else ()
    metrics.add("operator_is_leader", "1 for the one that acts", [((), float(view.is_leader))])
    metrics.add("operator_snapshot_age_seconds", "Since its last turn began", [((), view.seen_age_s)])
    metrics.add("operator_look_seconds", "What gathering the cluster for it took", [((), view.look_s)])
    metrics.add("operator_plan_seconds", "What the last plan took", [((), view.decide_s)])
    metrics.add("operator_turns", "Turns that were made", [((), view.turns)], counter=True)
    metrics.add("operator_actions", "What was done",
                (((what,), count) for what, count in sorted(view.counts.done.items())),
                ("what",), counter=True)  # fmt: skip
    metrics.add("operator_api_requests", "Requests to the API server, also LIST and WATCH; code 0: no answer",
                (((verb, str(code)), count) for (verb, code), count in sorted(view.requests.items())),
                ("verb", "code"), counter=True)  # fmt: skip
    metrics.add_histogram("operator_deletion_delay_seconds",
                          "From a decision until the API server has taken the deletion of a pod",
                          view.counts.delays, DELAY_BOUNDS_S, view.counts.delays_sum_s)  # fmt: skip
    metrics.add("nodes", "Nodes of the cluster", [((), view.nodes if view.is_leader else None)])
    phases = Counter(str(job.status.get("phase") or "Waiting") for job in jobs)
    metrics.add("jobs", "Jobs by phase", (((name,), phases[name]) for name in _JOB_PHASES), ("phase",))

    def of_jobs(name: str, meaning: str, value: Callable[[SeenJob], float | None]) -> None:
        metrics.add(name, meaning, (((job.namespace, job.name), value(job)) for job in jobs), ("namespace", "job"))

    of_jobs("job_workers_desired", "Workers that a job shall have", lambda job: _workers(job, "desired"))
    of_jobs("job_workers_running", "Workers that run", lambda job: _workers(job, "running"))
    of_jobs(
        "job_workers_least",
        "Fewest workers that it runs with",
        lambda job: None if job.spec is None else job.spec.least,
    )
    of_jobs(
        "job_workers_most", "Most workers that it may have", lambda job: None if job.spec is None else job.spec.most
    )
    of_jobs("job_launcher_failures", "Launchers that have failed",
            lambda job: (job.status.get("launcher") or {}).get("failures", 0))  # fmt: skip
    of_jobs("job_waits_seconds", "Since when it waits for its minimum", lambda job: _waits_s(job, view.now_s))
    return metrics.document()


def _workers(job: SeenJob, which: str) -> float:
    return float((job.status.get("workers") or {}).get(which, 0))


def _waits_s(job: SeenJob, now_s: float) -> float | None:
    """``None`` where it does not."""
    for one in job.status.get("conditions") or []:
        if one.get("type") == "Admitted" and one.get("status") == "False" and one.get("reason") != "NotAsked":
            since_s = epoch_s(one.get("lastTransitionTime"))
            return None if since_s is None or job.is_over else max(0.0, now_s - since_s)
    return None
