"""What the operator sees by watches, when these are late, are cut, or begin too far back; on a real API server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from cluster import Cluster, wait_for
from operator_run import Run, check_no_pod_twice, job
from watch_proxy import WatchProxy

from edl_hvd.errors import PlatformError
from edl_hvd.kubernetes import api as api_module
from edl_hvd.kubernetes.api import ResourceExpiredError
from edl_hvd.kubernetes.informer import Informer

LISTS = ("/trainingjobs?limit=", "/nodes?limit=", "/pods?limit=", "/priorityclasses?limit=")


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[WatchProxy]:
    with WatchProxy(cluster.port) as made:
        yield made


def lists(proxy: WatchProxy) -> list[int]:
    return [proxy.count("GET", words) for words in LISTS]


def test_while_the_watches_are_late_nothing_is_done_twice(make_run: Callable[..., Run], proxy: WatchProxy) -> None:
    proxy.watch_delay_s = 3.0
    run = make_run({"a": 3, "b": 3}, has_operator=False)
    run.start_operator(run.cluster.config_by(proxy.url))
    run.apply(job(least=2, most=4))
    run.wait_running(4)
    run.kubectl("scale", "tj/resnet", "--replicas", "2")
    run.wait_running(2)
    run.kubectl("scale", "tj/resnet", "--replicas", "3")
    run.wait_running(3)
    assert proxy.count("POST", "/pods") >= 6
    assert proxy.refused("POST", "/pods") == [], "none was asked for that was there already"
    assert len(proxy.deleted) == proxy.count("DELETE", "/pods/") >= 2
    assert len(set(proxy.deleted)) == len(proxy.deleted), "each was deleted once"
    assert lists(proxy) == [1, 1, 1, 1]
    check_no_pod_twice(run)


def test_the_pods_of_one_job_are_deleted_side_by_side(make_run: Callable[..., Run], proxy: WatchProxy) -> None:
    run = make_run({"a": 21, "b": 21}, has_operator=False)
    operator = run.start_operator(run.cluster.config_by(proxy.url))
    run.apply(job(least=2, most=40))
    run.wait_running(40)
    begun, proxy.deletion_s = len(proxy.requests), 0.5
    run.kubectl("scale", "tj/resnet", "--replicas", "20")
    wait_for("a deletion", lambda: proxy.deleting)
    began_s = time.monotonic()
    wait_for("all deletions", lambda: len(proxy.deleted) >= 20 and not proxy.deleting)
    print(f"20 deletions of 0.5 s each took {time.monotonic() - began_s:.1f} s, {proxy.most_deleting} at once")
    assert proxy.most_deleting == 8, "a bounded number"
    run.wait_running(20)
    done = [method for method, path in proxy.requests[begun:] if "/pods/" in path or path.endswith("/status")]
    assert done.index("PATCH") < done.index("DELETE"), "what is planned is written down first"
    run.kubelet.finish(f"/api/v1/namespaces/{run.namespace}/pods/resnet-launcher", 0)
    wait_for("some deletions", lambda: proxy.deleting >= 4)
    operator.kill()
    operator.wait(60)
    proxy.deletion_s = 0.0
    run.start_operator(run.cluster.config_by(proxy.url))
    wait_for("no worker", lambda: not run.pods())
    run.kubectl("wait", "tj/resnet", "--for=condition=Complete", "--timeout=180s")
    check_no_pod_twice(run)


def test_no_change_is_lost_when_watches_are_cut(make_run: Callable[..., Run], proxy: WatchProxy) -> None:
    run, chance = make_run({"a": 3, "b": 3}, has_operator=False), random.Random(5)
    run.start_operator(run.cluster.config_by(proxy.url))
    run.apply(job(least=1, most=2))
    run.wait_running(2)
    for count in (4, 2, 5, 1):
        wait_for("a watch of each kind", lambda: proxy.watches == 4)
        run.kubectl("scale", "tj/resnet", "--replicas", str(count))
        time.sleep(chance.uniform(0.0, 0.5))
        assert proxy.cut_watches() == 4
        run.wait_running(count)
    wait_for("a watch of each kind", lambda: proxy.watches == 4)
    healthy = run.alive()
    proxy.is_shut = True
    assert proxy.cut() >= 4
    run.kubectl("scale", "tj/resnet", "--replicas", "4")
    [lost] = run.pods()
    run.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=true")
    time.sleep(2.0)
    proxy.is_shut = False
    run.wait_running(4)
    assert not healthy & run.alive()
    check_no_pod_twice(run)


def test_the_api_server_may_be_killed(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 3, "b": 3})
    run.apply(job(least=1, most=3))
    run.wait_running(3)
    healthy = run.alive()
    run.cluster.restart_api_server()
    run.kubectl("scale", "tj/resnet", "--replicas", "5")
    run.wait_running(5)
    assert healthy <= run.alive(), "no healthy worker is touched"
    [operator] = run.operators
    assert operator.poll() is None
    check_no_pod_twice(run)


def name_of(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


class Watched:
    """The ConfigMaps of a namespace, and an informer of them."""

    def __init__(self, cluster: Cluster, namespace: str, config: str, watch_s: int) -> None:
        self.cluster, self.path = cluster, f"/api/v1/namespaces/{namespace}/configmaps"
        self.news = threading.Event()
        self.api = cluster.client(config)
        self.informer = Informer(self.api, self.path, name_of, self.news, watch_s)

    def create(self, name: str, note: str = "") -> None:
        self.cluster.api.create(self.path, {"metadata": {"name": name, "annotations": {"note": note}}})

    def delete(self, name: str) -> None:
        one = self.cluster.api.get(f"{self.path}/{name}")
        self.cluster.api.delete(f"{self.path}/{name}", one["metadata"]["uid"], 0)

    def names(self) -> set[str]:
        """Those that are not the cluster's own, such as kube-root-ca.crt."""
        return {name for name in self.informer.cache.values() if not name.endswith(".crt")}

    def is_current(self) -> bool:
        try:
            return self.informer.is_current
        except PlatformError:
            return False


@pytest.fixture
def watched(cluster: Cluster, namespace: str, proxy: WatchProxy) -> Iterator[Watched]:
    made = Watched(cluster, namespace, cluster.config_by(proxy.url, "admin.json"), watch_s=4)
    yield made
    made.informer.close()
    made.api.close()


def test_one_that_is_listed_in_pages_is_told_of_each_change(
    watched: Watched, proxy: WatchProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_PAGE", 3)
    for number in range(7):
        watched.create(f"c{number}")
    wait_for("the namespace's own", lambda: len(list(watched.cluster.api.list(watched.path))) in (8, 9))
    watched.informer.start()
    wait_for("the list", watched.is_current)
    assert watched.names() == {f"c{number}" for number in range(7)}
    assert proxy.count("GET", "?limit=3") == 3
    watched.news.clear()
    watched.create("odd", note="lines that end\u0085in ways\u2028of their own\n")
    wait_for("what is new", lambda: "odd" in watched.names())
    watched.delete("c0")
    wait_for("what has gone", lambda: "c0" not in watched.names())
    assert watched.news.is_set()
    begun = proxy.count("GET", "watch=1")
    wait_for("the next watches", lambda: proxy.count("GET", "watch=1") >= begun + 2)
    watched.create("late")
    wait_for("what is new", lambda: "late" in watched.names())
    assert proxy.count("GET", "?limit=3") == 3, "a watch that ends in its time goes on from where it was"
    assert watched.api.requests["WATCH", 200] >= 3


def test_a_version_that_is_not_kept_any_more_is_listed_anew(watched: Watched, proxy: WatchProxy) -> None:
    watched.create("before")
    watched.cluster.restart_api_server()  # which remembers no changes of before
    with pytest.raises(ResourceExpiredError, match="410"):
        list(watched.cluster.api.watch(watched.path, "1", 5))
    watched.informer.start()
    wait_for("the list", watched.is_current)
    proxy.expired = 1
    wait_for("a new list", lambda: proxy.count("GET", "?limit=") == 2)
    watched.create("after")
    wait_for("what is new", lambda: watched.names() == {"before", "after"})
    assert proxy.count("GET", "?limit=") == 2
    assert (proxy.expired, watched.api.requests.get(("WATCH", 0), 0)) == (0, 0), "no watch was cut"


def test_a_watch_that_begins_late_is_no_reason_to_act_on_what_was_before(watched: Watched, proxy: WatchProxy) -> None:
    watched.create("before")
    watched.informer.start()
    wait_for("the list", watched.is_current)
    proxy.is_held = True
    begun = proxy.count("GET", "watch=1")
    wait_for("the next watch", lambda: proxy.count("GET", "watch=1") > begun)
    assert not watched.is_current(), "no turn is made from what no watch keeps up"
    watched.create("between")
    watched.delete("before")
    time.sleep(1.5)
    proxy.is_held = False
    wait_for("a new list", watched.is_current)
    assert watched.names() == {"between"}, "as soon as it counts as current"
    assert proxy.count("GET", "?limit=") == 2


@pytest.mark.parametrize("way", ["TLS", "proxy"])
def test_it_ends_at_once_in_the_middle_of_a_watch(
    cluster: Cluster, namespace: str, proxy: WatchProxy, way: str
) -> None:
    config = "admin.json" if way == "TLS" else cluster.config_by(proxy.url, "admin.json")
    watched = Watched(cluster, namespace, config, watch_s=290)
    watched.informer.start()
    wait_for("the list", watched.is_current)
    watched.informer.close()
    watched.informer._thread.join(60)
    assert not watched.informer._thread.is_alive()
    watched.api.close()


def test_at_rest_nothing_is_asked_but_the_lease(make_run: Callable[..., Run], proxy: WatchProxy) -> None:
    run = make_run({"a": 3}, has_operator=False)
    run.start_operator(run.cluster.config_by(proxy.url))
    run.apply(job(least=1, most=2))
    run.wait_running(2)
    began = 0

    def others() -> list[tuple[str, str]]:
        return [one for one in proxy.requests[began:] if "/leases/" not in one[1] and "watch=1" not in one[1]]

    def is_quiet() -> bool:
        nonlocal began
        if others():
            began = len(proxy.requests)
        return len(proxy.requests) - began >= 5

    wait_for("five renewals without anything else", is_quiet)
    renewals = [one for one in proxy.requests[began:] if "/leases/" in one[1]]
    assert {method for method, _ in renewals} == {"PUT"}
    assert lists(proxy) == [1, 1, 1, 1]
    label = {"metadata": {"labels": {"note": "of others"}}}
    for number in range(20):
        label["metadata"]["labels"]["note"] = str(number)
        run.cluster.api.patch(f"/api/v1/namespaces/{run.namespace}/pods/resnet-worker-0", label)
    told = len(proxy.requests)
    wait_for("two more renewals", lambda: len(proxy.requests) >= told + 2)
    assert others() == [], "what is not read of a pod may change"
