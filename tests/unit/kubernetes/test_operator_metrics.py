"""What Prometheus reads of an operator, that runs on an API server in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_operator_turn import item

from edl_hvd.cli.metrics_text import operator_metrics
from edl_hvd.errors import ObjectMissingError, PlatformError
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.operator import Leadership, Operator


class MemoryServer:
    """Lists of objects; what is created and written is kept."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        node = {
            "metadata": {"name": "a"},
            "status": {"allocatable": {"cpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        classes = [{"metadata": {"name": f"edl-hvd-{name}"}, "value": value} for name, value in
                   (("floor", 0), ("extra", -10))]  # fmt: skip
        self.lists: dict[str, list[dict[str, Any]]] = {
            "nodes": [node], "pods": [], "trainingjobs": list(jobs), "priorityclasses": classes
        }  # fmt: skip
        self.requests: Counter[tuple[str, int]] = Counter()
        self.is_away = False

    def list(self, path: str) -> list[dict[str, Any]]:
        if self.is_away:
            self.requests["GET", 0] += 1
            raise PlatformError("the API server does not answer")
        self.requests["GET", 200] += 1
        return self.lists[path.rpartition("/")[2]]

    def get(self, path: str) -> dict[str, Any]:
        raise ObjectMissingError(path)

    def create(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        self.requests["POST", 201] += 1
        return manifest

    def patch(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
        self.requests["PATCH", 200] += 1
        name = path.split("/")[-2]
        [job] = [one for one in self.lists["trainingjobs"] if one["metadata"]["name"] == name]
        job["status"] = change["status"]
        return job


Samples = dict[tuple[str, str], float]


def samples(operator: Operator) -> Samples:
    text = operator_metrics(operator.view()).text
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name, ",".join(value for _, value in sorted(one.labels.items()))] = one.value
    return found


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(item("one", 1, 3), item("big", 9, 9), item("wrong", 3, 2))


def test_jobs_requests_and_the_turn_are_seen(server: MemoryServer) -> None:
    api = cast(ApiServer, server)
    leadership = Leadership(api, "edl-hvd", "me")
    operator = Operator(api, leadership, lambda text: None)
    before = samples(operator)
    assert before["edl_hvd_operator_is_leader", ""] == 0
    assert ("edl_hvd_operator_snapshot_age_seconds", "") not in before
    leadership.renew()
    operator.act()
    operator.act()
    found = samples(operator)
    assert found["edl_hvd_operator_is_leader", ""] == 1
    assert found["edl_hvd_operator_turns_total", ""] == 2
    assert found["edl_hvd_nodes", ""] == 1
    assert found["edl_hvd_operator_snapshot_age_seconds", ""] >= 0
    assert (found["edl_hvd_jobs", "Starting"], found["edl_hvd_jobs", "Rejected"]) == (1, 2)
    assert found["edl_hvd_job_workers_desired", "one,n"] == 3
    assert found["edl_hvd_job_workers_running", "one,n"] == 0
    assert (found["edl_hvd_job_workers_least", "one,n"], found["edl_hvd_job_workers_most", "one,n"]) == (1, 3)
    assert ("edl_hvd_job_workers_least", "wrong,n") not in found, "that cannot be read"
    assert found["edl_hvd_operator_actions_total", "status written"] == 3
    assert found["edl_hvd_operator_actions_total", "pod created"] == 8, "twice a launcher and three: none is seen"
    assert found["edl_hvd_operator_api_requests_total", "200,GET"] == 8


def test_a_server_that_is_away_is_counted_and_what_was_seen_stays(server: MemoryServer) -> None:
    api = cast(ApiServer, server)
    leadership = Leadership(api, "edl-hvd", "me")
    operator = Operator(api, leadership, lambda text: None)
    leadership.renew()
    operator.act()
    operator.act()
    server.is_away = True
    with pytest.raises(PlatformError):
        operator.act()
    found = samples(operator)
    assert found["edl_hvd_operator_api_requests_total", "0,GET"] == 1
    assert found["edl_hvd_operator_turns_total", ""] == 2
    assert found["edl_hvd_jobs", "Starting"] == 1


def test_a_job_that_waits_says_since_when(server: MemoryServer) -> None:
    api = cast(ApiServer, server)
    server.lists["trainingjobs"] = [item("first", 4, 4), item("second", 4, 4)]
    leadership = Leadership(api, "edl-hvd", "me")
    operator = Operator(api, leadership, lambda text: None)
    leadership.renew()
    operator.act()
    operator.act()
    found = samples(operator)
    assert found["edl_hvd_jobs", "Waiting"] == 1
    assert found["edl_hvd_job_waits_seconds", "second,n"] >= 0
    assert ("edl_hvd_job_waits_seconds", "first,n") not in found
