"""What Prometheus reads of an operator, that runs on an API server in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_operator_turn import item
from waiting import until

from edl_hvd.cli.metrics_text import operator_metrics
from edl_hvd.errors import ObjectMissingError, PlatformError
from edl_hvd.kubernetes.api import ApiServer, ListPage, WatchEvent
from edl_hvd.kubernetes.informer import ClusterWatch
from edl_hvd.kubernetes.leadership import Leadership
from edl_hvd.kubernetes.operator import Operator
from edl_hvd.kubernetes.snapshot import ClusterSnapshot


class MemoryServer:
    """Objects by resource and name, with lists and watches; what is created and written is kept."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        node = {
            "metadata": {"name": "a"},
            "status": {"allocatable": {"cpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        classes = [{"metadata": {"name": f"edl-hvd-{name}"}, "value": value} for name, value in
                   (("floor", 0), ("extra", -10))]  # fmt: skip
        self.changed = threading.Condition()
        self.objects: dict[str, dict[str, dict[str, Any]]] = {}
        self.events: list[tuple[str, WatchEvent]] = []
        self.requests: Counter[tuple[str, int]] = Counter()
        self.is_away = False
        for resource, items in (("nodes", [node]), ("trainingjobs", jobs), ("priorityclasses", classes)):
            for one in items:
                self.put(resource, one)

    def put(self, resource: str, given: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            name = given["metadata"]["name"]
            there = self.objects.setdefault(resource, {})
            made = deepcopy({**there.get(name, {}), **given})
            made["metadata"] = {"uid": f"uid-{name}", **made["metadata"], "resourceVersion": str(len(self.events) + 1)}
            self.events.append((resource, WatchEvent("MODIFIED" if name in there else "ADDED", made)))
            there[name] = made
            self.changed.notify_all()
            return made

    def end(self) -> None:
        with self.changed:
            self.is_away = True
            self.changed.notify_all()

    def answer(self, verb: str, code: int) -> None:
        with self.changed:
            self.requests[verb, 0 if self.is_away else code] += 1
        if self.is_away:
            raise PlatformError("the API server does not answer")

    def pages(self, path: str) -> Iterator[ListPage]:
        self.answer("LIST", 200)
        with self.changed:
            yield ListPage(tuple(self.objects.get(path.rpartition("/")[2], {}).values()), str(len(self.events)))

    def watch(self, path: str, version: str, within_s: int) -> MemoryStream:
        self.answer("WATCH", 200)
        return MemoryStream(self, path.rpartition("/")[2], int(version))

    def get(self, path: str) -> dict[str, Any]:
        _, resource, name = path.rsplit("/", 2)
        if name not in self.objects.get(resource, {}):
            raise ObjectMissingError(path)
        return deepcopy(self.objects[resource][name])

    def replace(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        self.answer("PUT", 200)
        return self.put(path.split("/")[-2], manifest)

    def delete(self, path: str, uid: str, grace_s: int | None) -> None:
        self.answer("DELETE", 200)
        resource, name = path.split("/")[-2:]
        with self.changed:
            self.events.append((resource, WatchEvent("DELETED", self.objects[resource].pop(name))))
            self.changed.notify_all()

    def create(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        self.answer("POST", 201)
        return self.put(path.rpartition("/")[2], manifest)

    def patch(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
        self.answer("PATCH", 200)
        name = path.split("/")[-2]
        job = self.objects["trainingjobs"][name]
        return self.put("trainingjobs", {**job, "status": change["status"]})


class MemoryStream:
    """A watch of such a server; it ends when that is away."""

    def __init__(self, server: MemoryServer, resource: str, told: int) -> None:
        self.server, self.resource, self.told, self.is_over = server, resource, told, False

    def __iter__(self) -> Iterator[WatchEvent]:
        server = self.server
        while not self.is_over:
            with server.changed:
                server.changed.wait_for(lambda: self.is_over or server.is_away or len(server.events) > self.told, 300)
                rest, self.told = server.events[self.told :], len(server.events)
            if server.is_away:
                raise PlatformError("the connection is gone")
            yield from (event for resource, event in rest if resource == self.resource)

    def end(self) -> None:
        with self.server.changed:
            self.is_over = True
            self.server.changed.notify_all()

    def close(self) -> None:
        self.end()


def turn(operator: Operator) -> None:
    """A turn, once everything is listed."""
    until(operator.act)


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


@pytest.fixture
def leadership(server: MemoryServer) -> Leadership:
    return Leadership(cast(ApiServer, server), "edl-hvd", "me")


@pytest.fixture
def operator(server: MemoryServer, leadership: Leadership) -> Iterator[Operator]:
    made = Operator(cast(ApiServer, server), leadership, lambda text: None)
    yield made
    made.end()
    made.run()  # closes what is open


def test_jobs_requests_and_the_turn_are_seen(leadership: Leadership, operator: Operator) -> None:
    before = samples(operator)
    assert before["edl_hvd_operator_is_leader", ""] == 0
    assert ("edl_hvd_operator_snapshot_age_seconds", "") not in before
    leadership.renew()
    turn(operator)
    turn(operator)
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
    assert found["edl_hvd_operator_actions_total", "pod created"] == 4, "a launcher and three workers"
    assert found["edl_hvd_operator_api_requests_total", "200,LIST"] == 4, "each kind once, for two turns"
    assert found["edl_hvd_operator_api_requests_total", "200,WATCH"] == 4


def test_deletions_are_counted_by_the_time_since_the_decision(
    server: MemoryServer, leadership: Leadership, operator: Operator
) -> None:
    leadership.renew()
    turn(operator)
    assert samples(operator)["edl_hvd_operator_deletion_delay_seconds_bucket", "+Inf"] == 0
    server.put("trainingjobs", item("one", 1, 3, suspend=True))
    bucket = "edl_hvd_operator_deletion_delay_seconds_bucket"
    while not samples(operator)[bucket, "+Inf"]:
        turn(operator)
    found = samples(operator)
    assert found[bucket, "+Inf"] == found["edl_hvd_operator_actions_total", "pod deleted"] == 1, "the launcher"
    assert found[bucket, "0.05"] <= found[bucket, "5"] <= 1
    assert found["edl_hvd_operator_deletion_delay_seconds_sum", ""] > 0


def test_a_server_that_is_away_is_counted_and_what_was_seen_stays(
    server: MemoryServer, leadership: Leadership, operator: Operator
) -> None:
    leadership.renew()
    turn(operator)
    turn(operator)
    server.end()
    problem = ""
    while not problem:
        try:
            turn(operator)
        except PlatformError as error:
            problem = str(error)
    before = samples(operator)
    for _ in range(3):
        with pytest.raises(PlatformError):
            operator.act()
    while samples(operator).get(("edl_hvd_operator_api_requests_total", "0,LIST"), 0) < 4:
        time.sleep(0.01)
    found = samples(operator)
    assert found["edl_hvd_operator_api_requests_total", "200,LIST"] == 4
    assert found["edl_hvd_operator_turns_total", ""] == before["edl_hvd_operator_turns_total", ""]
    assert found["edl_hvd_jobs", "Starting"] == 1


def test_a_job_that_waits_says_since_when(server: MemoryServer, leadership: Leadership, operator: Operator) -> None:
    server.objects["trainingjobs"].clear()
    for name in ("first", "second"):
        server.put("trainingjobs", item(name, 4, 4))
    leadership.renew()
    turn(operator)
    turn(operator)
    found = samples(operator)
    assert found["edl_hvd_jobs", "Waiting"] == 1
    assert found["edl_hvd_job_waits_seconds", "second,n"] >= 0
    assert ("edl_hvd_job_waits_seconds", "first,n") not in found


def test_turns_that_take_long_leave_three_quarters_of_the_time(server: MemoryServer, leadership: Leadership) -> None:
    """As in a cluster of ten thousand hosts, whose jobs change all the time."""
    began_s: list[float] = []

    class Slow(Operator):
        def look(self, watch: ClusterWatch) -> ClusterSnapshot | None:
            began_s.append(time.monotonic())
            time.sleep(0.1)
            self._news.set()
            if len(began_s) == 8:
                self.end()
            return super().look(watch)

    Slow(cast(ApiServer, server), leadership, lambda text: None, every_s=0.0).run()
    # The first look may come before everything is listed, and is no turn then.
    assert began_s[-1] - began_s[2] >= 5 * 4 * 0.1
