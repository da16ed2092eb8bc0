"""A fleet as a page, and what Prometheus reads of a fleet and of a job."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from edl_hvd.cli.fleet_page import FleetPage
from edl_hvd.cli.formatting import duration
from edl_hvd.cli.metrics_text import job_metrics
from edl_hvd.discovery.watch import SourceTrouble
from edl_hvd.driver.measurements import WorkStatus
from edl_hvd.driver.status import Status, TrainingProgress, WorkerStatus
from edl_hvd.fleet.messages import FleetView, JobProgress, JobRow
from edl_hvd.fleet.state import FleetJob, HeldClaim, JobPhase, JobSpec
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import Curve
from edl_hvd.status_server import Document

SECRET = "--token=hunter2"
HOSTS = (HostSlots("a", 4), HostSlots("b", 4))


def row(name: str, slots: int, why: str = "all that it asks for") -> JobRow:
    spec = JobSpec(name=name, command=("python", "train.py", SECRET), folder="/", least=1, most=8)
    given = (HostSlots("a", slots),) if slots else ()
    phase = JobPhase.RUNNING if slots else JobPhase.WAITING
    job = FleetJob(spec, 0.0, phase=phase, why=why, given=given, share=given, run=1)
    return JobRow(job, JobProgress("training", slots, 1200, 345.6, 1100, 90.0), 3.0, 77.0)


def view(now_s: float, *rows: JobRow, claims: tuple[HeldClaim, ...] = ()) -> FleetView:
    return FleetView(now_s, HOSTS, rows, claims, free=1, lacking=3)


def samples(document: Document) -> dict[str, float]:
    """By name and labels, as Prometheus's own parser reads them."""
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(document.text)
        for sample in family.samples
    }


CLAIM = HeldClaim("web", 2, 1000, 50.0, granted=(HostSlots("b", 2),), whole_s=1.5)


def test_the_page_shows_why_the_hosts_are_those_known_before():
    page = FleetPage()
    page.update(replace(view(10.0), trouble=SourceTrouble("hosts line 2: <b> is no host", 75.0)))
    assert " (1:15 min ago): hosts line 2: &lt;b&gt; is no host</p>" in page.html().text
    page.update(view(11.0))
    assert "known before" not in page.html().text


def test_the_page_shows_jobs_claims_and_slots_over_time():
    page = FleetPage()
    page.update(view(10.0, row("one", 4)))
    page.update(view(60.0, row("one", 2), row("two", 2, "it waits"), claims=(CLAIM,)))
    text = page.html().text
    for words in (
        "8 slots on 2 hosts, 1 free; 3 more would be used",
        "it waits",
        "346",
        duration(90),
        "b:2",
        "has its",
    ):
        assert words in text, words
    page.update(view(70.0, row("one", 2), row("two", 2), claims=(CLAIM,)))
    text = page.html().text
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    heights = {band.findtext("title"): float(band.get("height", "")) for band in chart.iter("rect")}
    assert heights["one: 4 slots"] == 2 * heights["one: 2 slots"] == 2 * heights["web: 2 slots"]


def test_the_page_says_why_a_claim_has_no_room():
    page = FleetPage()
    page.update(view(10.0, claims=(HeldClaim("db", 9, 1000, 5.0, why="it needs 9 slots"),)))
    assert "it needs 9 slots" in page.html().text


def test_the_page_shows_no_command_and_runs_no_script():
    page = FleetPage()
    page.update(view(10.0, row("one", 4, why="<script>alert(1)</script>")))
    text = page.html().text
    assert SECRET not in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_before_the_first_view_there_is_a_page():
    assert "It starts" in FleetPage().html().text
    assert samples(FleetPage().metrics())["edl_hvd_slots[free]"] == 0


def test_prometheus_reads_the_fleet():
    page = FleetPage()
    page.update(view(60.0, row("one", 4), row("two", 0), claims=(CLAIM,)))
    found = samples(page.metrics())
    assert found["edl_hvd_slots[jobs]"] == 4
    assert found["edl_hvd_slots[claims]"] == 2
    assert found["edl_hvd_slots_lacking"] == 3
    assert found["edl_hvd_jobs[running]"] == found["edl_hvd_jobs[waiting]"] == 1
    assert found["edl_hvd_job_slots[one]"] == 4
    assert found["edl_hvd_job_left_seconds[one]"] == 90
    assert found["edl_hvd_job_waited_seconds_total[one]"] == 3
    assert found["edl_hvd_claim_wait_seconds[web]"] == 1.5


def test_prometheus_reads_a_job():
    workers = (WorkerStatus("a:0", "member"), WorkerStatus("a:1", "member"), WorkerStatus("b:0", "starting"))
    work = WorkStatus(Curve((1, 2), (10.0, 19.0)), left=500.0, change_s=0.2)
    status = Status(1.0, "training", 3, 2, TrainingProgress(7, 7, 448, 64.0), workers, work=work)
    found = samples(job_metrics(status))
    assert found["edl_hvd_state[training]"] == 1
    assert found["edl_hvd_state[waiting]"] == 0
    assert found["edl_hvd_workers[member]"] == 2
    assert found["edl_hvd_step"] == 7
    assert found["edl_hvd_goodput[2]"] == 19
    assert found["edl_hvd_work_left_samples"] == 500
    assert "edl_hvd_checkpoint_step" not in found, "there is none"
