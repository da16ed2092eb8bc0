"""Training jobs whose workers Kueue admits; Kueue is the real one, pods are puppets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster import wait_for
from kueue_run import Kueue
from operator_run import Run, job

GATE = "kueue.x-k8s.io/admission"


def queued(name: str = "resnet", least: int = 2, most: int = 4, **spec: Any) -> dict[str, Any]:
    made = job(name, least, most, **spec)
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    return made


def gated(run: Run, name: str = "resnet") -> int:
    return sum(
        any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or []) for pod in run.pods(name=name)
    )


def plain_pod(name: str, queue: str = "research") -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": queue}},
        "spec": {
            "priorityClassName": "edl-hvd-floor", "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "other", "resources": {"requests": {"cpu": "1"}}}],
        },
    }  # fmt: skip


def tier(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["edl-hvd.dev/tier"])


def test_the_minimum_is_admitted_as_a_whole_and_the_rest_one_by_one(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=1)
    run = make_run({"a": 2, "b": 3})
    run.apply(queued())
    waits = ("False", "WaitsForQuota")
    wait_for("the reason", lambda: run.condition("Admitted") == waits and gated(run) == 2)
    time.sleep(3.0)
    assert len(run.pods()) == gated(run) == 2, "one worker of two is no minimum, nor is an extra"
    assert "'kubectl -n " in run.kubectl("describe", "tj/resnet")
    kueue.queue("research", cpu=3)
    wait_for("the minimum and one more", lambda: run.running() == 3 and gated(run) == 1)
    held = "3 of 4 workers run; the scheduling gate kueue.x-k8s.io/admission holds 1"
    wait_for("the reason", lambda: held in run.kubectl("describe", "tj/resnet"))
    before = run.running_uids()
    kueue.queue("research", cpu=4)
    run.wait_running(4)
    assert before < run.running_uids(), "nobody was started anew"


def test_a_lost_worker_of_the_minimum_is_replaced_on_another_node(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=8)
    run = make_run({"a": 2, "b": 2})
    run.apply(queued(least=2, most=2))
    run.wait_running(2)
    lost = run.pods()[0]
    kept = run.running_uids() - {lost["metadata"]["uid"]}
    run.kubectl("cordon", lost["spec"]["nodeName"])
    run.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=false")
    wait_for("the other node", lambda: run.running() == 2 and lost["metadata"]["uid"] not in run.running_uids())
    assert kept < run.running_uids()
    run.wait_running(2)


def test_a_large_minimum_on_as_many_nodes_is_admitted(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=40)
    run = make_run({f"n{number}": 1 for number in range(21)})
    run.apply(queued(least=20, most=20))
    run.wait_running(20)


def test_a_pod_of_higher_priority_takes_single_workers(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=4)
    run = make_run({"a": 4, "b": 4})
    run.apply(queued())
    run.wait_running(4)
    before = run.running_uids()
    run.apply(plain_pod("urgent"))
    phase = ("get", "pod", "urgent", "-o", "jsonpath={.status.phase}")
    wait_for("the other pod", lambda: run.kubectl(*phase) == "Running")
    wait_for("the rest", lambda: run.running() == 3)
    assert run.running_uids() < before, "three go on as they were"
    run.kubectl("delete", "pod", "urgent")
    run.wait_running(4)


def test_a_suspended_job_leaves_its_quota_and_comes_back(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=2)
    run = make_run({"a": 3, "b": 3})
    run.apply(queued(least=2, most=2))
    run.wait_running(2)
    run.apply(queued("second", least=2, most=2))
    wait_for("pods that wait for the quota", lambda: gated(run, "second") == 2)
    run.kubectl("patch", "tj/resnet", "--type", "merge", "-p", '{"spec": {"suspend": true}}')
    run.wait_running(2, "second")
    run.kubectl("patch", "tj/resnet", "--type", "merge", "-p", '{"spec": {"suspend": false}}')
    wait_for("pods that wait for the quota", lambda: gated(run) == 2)
    run.kubectl("delete", "tj/second")
    run.wait_running(2)


def test_a_job_that_is_deleted_while_it_waits_leaves_nothing(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=1)
    run = make_run({"a": 4})
    run.apply(queued(least=2, most=3))
    wait_for("pods that wait for the quota", lambda: gated(run) == 2)
    run.kubectl("delete", "tj/resnet")
    wait_for("the pods to go", lambda: not run.pods())
    run.apply(queued(least=1, most=1))
    run.wait_running(1)


def test_borrowed_workers_are_given_back_and_the_minimum_last(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=0, cohort="team")
    kueue.queue("other", cpu=4, cohort="team")
    run = make_run({"a": 8})
    run.apply(queued())
    run.wait_running(4)
    least = {pod["metadata"]["uid"] for pod in run.pods() if tier(pod) == "floor"}
    run.apply(plain_pod("first", "other"), plain_pod("second", "other"))
    wait_for("the minimum alone", lambda: run.running_uids() == least)
    wait_for("extras that wait", lambda: gated(run) == 2)
    assert run.running_uids() == least
    run.apply(plain_pod("third", "other"))
    # An extra alone trains nothing, and would hold what others could use.
    wait_for("the minimum to wait alone", lambda: [tier(pod) for pod in run.pods()] == ["floor", "floor"])
    time.sleep(3.0)
    assert [tier(pod) for pod in run.pods()] == ["floor", "floor"]
    assert gated(run) == 2
    run.kubectl("delete", "pod", "first", "second", "third")
    run.wait_running(4)


def test_workers_on_nodes_of_another_flavor_are_told(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu={"spot": 2, "owned": 4})
    run = make_run({"a": 1, "b": 6}, has_operator=False)
    for node, flavor in (("a", "spot"), ("b", "owned")):
        run.kubectl("label", "node", f"{run.namespace}-{node}", f"flavor={flavor}")
    run.start_operator()
    run.apply(queued(least=2, most=2))
    lost = f"2 workers cannot start on {run.namespace}-b: it has no flavor=spot, as Kueue's flavor asks for"
    wait_for("the contradiction", lambda: lost in run.kubectl("describe", "tj/resnet"))
    run.kubectl("delete", "tj/resnet")
    picky = queued(least=2, most=4)
    picky["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {"flavor": "owned"}
    run.apply(picky)
    run.wait_running(4)
