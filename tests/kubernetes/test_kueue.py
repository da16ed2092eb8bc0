"""Training jobs whose workers Kueue admits; Kueue is the real one, pods are puppets."""

from __future__ import annotations

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


def test_the_minimum_is_admitted_as_a_whole_and_the_rest_one_by_one(kueue: Kueue, make_run: Callable[..., Run]) -> None:
    kueue.queue("research", cpu=1)
    run = make_run({"a": 2, "b": 3})
    run.apply(queued())
    wait_for("pods that wait for the quota", lambda: gated(run) >= 2)
    assert run.running() == 0, "one worker of two is no minimum"
    kueue.queue("research", cpu=3)
    wait_for("the minimum and one more", lambda: run.running() == 3)
    assert gated(run) == 1
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
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "urgent", "labels": {"kueue.x-k8s.io/queue-name": "research"}},
        "spec": {
            "priorityClassName": "edl-hvd-floor", "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "other", "resources": {"requests": {"cpu": "1"}}}],
        },
    }  # fmt: skip
    run.apply(pod)
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
    wait_for("pods that wait for the quota", lambda: gated(run) == 3)
    run.kubectl("delete", "tj/resnet")
    wait_for("the pods to go", lambda: not run.pods())
    run.apply(queued(least=1, most=1))
    run.wait_running(1)
