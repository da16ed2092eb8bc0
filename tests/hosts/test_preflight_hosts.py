"""A host that reaches the driver and not the others is found before it gets workers."""

from __future__ import annotations

import re

import namespaces
import pytest
from faults import Outside
from harness import write_hosts
from test_namespaces import job_over_ssh, network, run, sizes, variables
from training import Training

__all__ = ["job_over_ssh", "network", "run", "variables"]  # fixtures

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())

FLAGS = ("--preflight-bound", "20")  # three hosts share two cores here
OTHERS = [namespaces.ADDRESSES[name] for name in ("h1", "h2")]


def route(network, what: str) -> None:
    for address in OTHERS:
        network.hosts["h3"].run("ip", "route", what, "blackhole", f"{address}/32")


def test_a_host_cut_off_from_the_others_alone_gets_no_workers_and_the_job_starts_without_it(network, run):
    route(network, "add")
    outcome = run(flags=FLAGS)
    assert sizes(outcome) == [2]
    assert {line["worker"] for line in outcome.lines("end")} == {"h1:0", "h2:0"}
    assert re.search(
        r"edlrun: h3 gets no workers: .*no allreduce with .*; it is looked at again in 600 s", outcome.output
    )
    passed = re.findall(r"edlrun: (\S+) passed the preflight: cpu, \S+ GFLOP/s, allreduce of 1 MiB in", outcome.output)
    assert sorted(passed) == ["h1", "h2"]


def test_it_is_looked_at_again_when_discovery_has_lost_and_found_it(network, run, tmp_path):
    """Meanwhile somebody has put its routes right."""
    route(network, "add")

    def mend() -> None:
        route(network, "delete")
        write_hosts(tmp_path / "job", ("h1:1", "h2:1"))

    faults = (
        Outside(mend, step=5),
        Outside(lambda: write_hosts(tmp_path / "job", ("h1:1", "h2:1", "h3:1")), after=0, delay_s=3.0),
    )
    outcome = run(*faults, flags=FLAGS, training=Training(until_size=3))
    assert sizes(outcome) == [2, 3]
    assert "edlrun: h3 passed the preflight: " in outcome.output
