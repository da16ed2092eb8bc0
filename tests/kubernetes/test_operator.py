"""The operator on a real API server, with puppets as pods."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import pytest
from cluster import Cluster, wait_for
from operator_run import Run, check_no_pod_twice, job

from edl_hvd.kubernetes.leadership import LEASE_S, RENEW_EVERY_S


def test_a_job_runs_is_scaled_suspended_and_resumed_with_kubectl(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 3, "b": 3})
    run.apply(job(least=2, most=4))
    run.wait_running(4)
    [launcher] = run.pods("launcher")
    assert launcher["spec"]["containers"][0]["command"] == [
        "edlrun", "-np", "2", "--min-np", "2", "--agents-port", "7077", "--token-file", "/etc/edl-hvd/token",
        "--status-port", "$(POD_IP):9401", "python", "train.py",
    ]  # fmt: skip
    assert launcher["spec"]["automountServiceAccountToken"] is False

    def tiers() -> list[str]:
        """Of those that stay: a worker for whose node the launcher was chosen first moves to another one."""
        staying = [pod["metadata"] for pod in run.pods() if "deletionTimestamp" not in pod["metadata"]]
        return sorted(meta["labels"]["edl-hvd.dev/tier"] for meta in staying)

    wait_for("two of the least and two more", lambda: tiers() == ["extra", "extra", "floor", "floor"])
    run.wait_running(4)
    run.kubectl("wait", "tj/resnet", "--for=condition=Running", "--timeout=180s")
    head, row = run.kubectl("get", "tj").splitlines()
    assert head.split() == ["NAME", "STATE", "WORKERS", "MIN", "MAX", "PRIORITY", "LEFT", "AGE"]
    assert row.split()[:6] == ["resnet", "Training", "4/4", "2", "4", "edl-hvd-floor"]
    before = run.alive()
    run.kubectl("scale", "tj/resnet", "--replicas", "2")
    run.wait_running(2)
    assert run.alive() < before, "nobody is started anew"
    run.kubectl("patch", "tj/resnet", "--type", "merge", "-p", '{"spec": {"suspend": true}}')
    run.kubectl("wait", "tj/resnet", "--for=condition=Suspended", "--timeout=180s")
    assert run.pods() == run.pods("launcher") == []
    names = [name for what, name, _ in run.kubelet.history if what == "gone" and "resnet" in name]
    assert names.index("resnet-launcher") < names.index(names[-1]), "the launcher saves while its workers are there"
    run.kubectl("patch", "tj/resnet", "--type", "merge", "-p", '{"spec": {"suspend": false}}')
    run.wait_running(2)
    described = run.kubectl("describe", "tj/resnet")
    for reason in ("Floor", "Grown", "Shrunk", "UserAsked", "Training"):
        assert reason in described


def test_a_lost_worker_is_replaced_and_a_launcher_ends_the_job(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 4})
    run.apply(job(least=2, most=2))
    run.wait_running(2)
    lost = run.pods()[0]
    run.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=false")
    wait_for("another", lambda: lost["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in run.pods()})
    run.wait_running(2)
    first = run.pods("launcher")[0]["metadata"]["uid"]
    path = f"/api/v1/namespaces/{run.namespace}/pods/resnet-launcher"
    run.kubelet.finish(path, 75)

    def again() -> bool:
        found = run.pods("launcher")
        return bool(found) and found[0]["metadata"]["uid"] != first and found[0]["status"]["phase"] == "Running"

    wait_for("the launcher again", again)
    assert run.status()["launcher"]["failures"] == 0, "75: it saved, and is run again"
    run.kubelet.finish(path, 0)
    run.kubectl("wait", "tj/resnet", "--for=condition=Complete", "--timeout=180s")
    wait_for("no worker", lambda: not run.pods())
    assert len(run.pods("launcher")) == 1, "it stays, for its output"


def test_a_launcher_that_fails_too_often_fails_the_job(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 4})
    run.apply(job(retries=1))
    path, seen = f"/api/v1/namespaces/{run.namespace}/pods/resnet-launcher", set[str]()
    for _ in range(2):

        def runs() -> list[str]:
            return [
                one["metadata"]["uid"] for one in run.pods("launcher")
                if one["status"]["phase"] == "Running" and one["metadata"]["uid"] not in seen
            ]  # fmt: skip

        seen.add(wait_for("a launcher", runs)[0])
        run.kubelet.finish(path, 1)
    run.kubectl("wait", "tj/resnet", "--for=condition=Failed", "--timeout=180s")
    assert run.status()["launcher"]["failures"] == 2
    assert "exit code 1" in run.kubectl("get", "tj/resnet", "-o", "jsonpath={.status.launcher.words}")
    wait_for("no worker", lambda: not run.pods())


def test_bad_jobs_say_so_and_touch_no_other(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 5})
    run.apply(job("good", 1, 2))
    run.wait_running(2, "good")
    before = {pod["metadata"]["uid"] for pod in run.pods(name="good")}
    no_container = job("empty")
    no_container["spec"]["workers"]["template"] = {"spec": {"containers": []}}
    bad_field = job("refused", 1, 1)
    bad_field["spec"]["workers"]["template"]["spec"]["dnsPolicy"] = "Sometimes"
    run.apply(
        job("above", 3, 2), no_container, job("huge", 1, 1, cpu="64"), job("classless", priorityClassName="none"),
        job("many", 1, 1, cpu="lots"), bad_field,
    )  # fmt: skip
    wanted = {
        "above": "MinAboveMax", "empty": "BadTemplate", "huge": "NeverFits", "classless": "NoPriorityClass",
        "many": "BadTemplate",
    }  # fmt: skip
    for name, reason in wanted.items():
        wait_for(name, lambda name=name, reason=reason: run.condition("Accepted", name) == ("False", reason))
        assert run.pods(name=name) == run.pods("launcher", name) == []
        assert reason in run.kubectl("describe", f"tj/{name}")
    wait_for("an event", lambda: "Refused" in run.events())
    for least, most, words in ((0, 1, "greater than or equal to 1"), ("two", 1, "integer")):
        made = json.dumps(job("wrong", least, most))
        assert words in run.kubectl("apply", "-f", "-", stdin=made, check=False)
    other = json.dumps({**job("other"), "apiVersion": "edl-hvd.dev/v2"})
    assert 'no matches for kind "TrainingJob"' in run.kubectl("apply", "-f", "-", stdin=other, check=False)
    assert {pod["metadata"]["uid"] for pod in run.pods(name="good")} == before
    run.wait_running(2, "good")


def test_a_service_gets_room_and_gives_it_back(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 2, "b": 2})
    run.apply(job(least=1, most=3))
    run.wait_running(3)
    floor = {pod["metadata"]["uid"] for pod in run.pods() if pod["metadata"]["labels"]["edl-hvd.dev/tier"] == "floor"}
    web = ("create", "deployment", "web", "--image", "web", "--dry-run=client", "-o", "json")
    made = json.loads(run.kubectl(*web))
    made["spec"]["replicas"] = 2
    made["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    run.apply(made)
    run.kubectl("wait", "deployment/web", "--for=condition=Available", "--timeout=180s")
    run.wait_running(1)
    assert run.alive() == floor, "its least is untouched"
    assert "Shrunk" in run.events()
    run.kubectl("delete", "deployment", "web")
    run.wait_running(3)


def test_two_jobs_share_and_the_room_of_one_goes_to_the_other(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 5})
    run.apply(job("one", 1, 4))
    run.wait_running(4, "one")
    run.apply(job("two", 1, 4))
    run.wait_running(2, "two")
    run.wait_running(2, "one")
    run.kubectl("delete", "tj/one")
    run.wait_running(4, "two")
    wait_for("nothing of it", lambda: not run.pods(name="one"))


def test_a_node_with_a_taint_is_used_by_those_who_tolerate_it(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 3, "b": 2})
    node = f"{run.namespace}-b"
    run.kubectl("taint", "nodes", node, "team=vision:NoSchedule")
    run.apply(job("plain", 1, 3))
    run.wait_running(2, "plain")
    vision = job("vision", 1, 2)
    vision["spec"]["workers"]["template"]["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    run.apply(vision)

    def nodes(name: str) -> set[str]:
        return {pod["spec"].get("nodeName", "") for pod in run.pods(name=name)}

    wait_for("a worker behind the taint", lambda: node in nodes("vision"))
    assert node not in nodes("plain")


def test_an_operator_without_rights_or_server_says_so(cluster: Cluster, make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 2}, has_operator=False)
    log = cluster.folder / "operator.log"
    start = log.stat().st_size if log.exists() else 0
    run.start_operator("nobody.json")
    wait_for("a word", lambda: "403" in log.read_text()[start:] if log.exists() else False)
    assert "apply the operator's manifests" in log.read_text()[start:]
    run.start_operator(cluster.config_by("https://127.0.0.1:9", "nobody.json"))
    wait_for("a word", lambda: "the API server does not answer" in log.read_text()[start:])
    assert all(operator.poll() is None for operator in run.operators), "it tries again"
    lines = log.read_text()[start:].splitlines()
    assert len(lines) <= 4, "and says it once"


def test_an_operator_may_be_killed_at_any_moment(make_run: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    kills = int(request.config.getoption("--operator-kills"))
    run, chance = make_run({"a": 6, "b": 6}, has_operator=False), random.Random(7)
    run.apply(job("one", 2, 6), job("two", 2, 6))
    operator = run.start_operator()
    for number in range(kills):
        time.sleep(chance.uniform(0.0, 1.5))
        operator.kill()
        operator.wait(60)
        if number % 10 == 5:
            run.kubectl("scale", "tj/one", "--replicas", str(chance.randint(2, 6)))
        if number % 10 == 9:
            with suppress(IndexError):
                run.kubectl("delete", "pod", run.pods(name="two")[0]["metadata"]["name"], "--wait=false")
        operator = run.start_operator()
    run.kubectl("scale", "tj/one", "--replicas", "6")
    run.wait_settled("one", "two")  # there is room for ten or eleven: who gets the last ones depends on what was before
    assert min(run.running("one"), run.running("two")) >= 2
    assert run.running("one") + run.running("two") >= 10
    quiet = {pod["metadata"]["uid"] for name in ("one", "two") for pod in run.pods(name=name)}
    told = len(run.kubelet.history)
    for _ in range(10):
        time.sleep(chance.uniform(0.0, 1.5))
        operator.kill()
        operator.wait(60)
        operator = run.start_operator()
    renewed = run.cluster.kubectl("-n", "edl-hvd", "get", "lease", "-o", "jsonpath={.items[0].spec.renewTime}")
    lease = ("-n", "edl-hvd", "get", "lease", "-o", "jsonpath={.items[0].spec.renewTime}")
    wait_for("another turn", lambda: run.cluster.kubectl(*lease) > renewed)
    after = {pod["metadata"]["uid"] for name in ("one", "two") for pod in run.pods(name=name)}
    assert after == quiet, "no healthy worker is touched"
    assert run.kubelet.history[told:] == []
    check_no_pod_twice(run)


def metric(port: int, name: str) -> float:
    """A sample without labels; -1: not served, or not there."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.search(rf"^edl_hvd_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else -1.0
    return -1.0


def test_when_an_operator_is_killed_another_takes_its_place(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 6}, has_operator=False)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    operators = {}
    for port in ports:
        flags = ("--metrics-port", str(port))
        operators[port] = run.start_operator(identity=f"operator-{port}", flags=flags)

    def leaders() -> list[int]:
        return [port for port in ports if metric(port, "operator_is_leader") == 1]

    run.apply(job("one", 1, 3))
    run.wait_running(3, "one")
    [leader] = wait_for("one that acts", leaders)
    [other] = set(ports) - {leader}
    assert metric(other, "nodes") == -1, "who does not act does not look"
    healthy = run.alive("one")
    killed_s = time.monotonic()
    operators[leader].kill()
    operators[leader].wait(60)
    run.kubectl("scale", "tj/one", "--replicas", "5")
    wait_for("the other one acts", lambda: metric(other, "operator_is_leader") == 1)
    idle_s = time.monotonic() - killed_s
    print(f"the other one acts after {idle_s:.1f} s")
    assert idle_s >= LEASE_S - 2 * RENEW_EVERY_S, "not before the Lease of the first is over"
    run.wait_running(5, "one")
    assert healthy <= run.alive("one"), "no healthy worker is touched"
    check_no_pod_twice(run)
    assert metric(other, "nodes") >= 1


def test_operators_take_turns_at_any_moment(make_run: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    swaps = int(request.config.getoption("--operator-swaps"))
    run, chance = make_run({"a": 6, "b": 6}, has_operator=False), random.Random(11)
    run.apply(job("one", 2, 6), job("two", 2, 6))
    both = {name: run.start_operator(identity=name) for name in ("swap-0", "swap-1")}
    spec = ("-n", "edl-hvd", "get", "lease", "edl-hvd-operator", "-o", "jsonpath={.spec.holderIdentity}")

    def leader() -> str:
        name = run.cluster.kubectl(*spec, check=False)
        return name if name in both else ""

    for number in range(swaps):
        first = wait_for("one that acts", leader)
        time.sleep(chance.uniform(0.0, 0.5))
        if number % 5 == 2:
            run.kubectl("scale", "tj/one", "--replicas", str(chance.randint(2, 6)))
        ended = both.pop(first)
        if number % 20 == 5:
            ended.kill()  # the other one waits until the Lease is over
        else:
            ended.terminate()
        wait_for("the other one", lambda first=first: leader() not in ("", first))
        ended.wait(60)
        name = f"swap-{number + 2}"
        both[name] = run.start_operator(identity=name)
    run.kubectl("scale", "tj/one", "--replicas", "6")
    run.wait_settled("one", "two")
    assert min(run.running("one"), run.running("two")) >= 2
    assert run.running("one") + run.running("two") >= 10
    quiet = {name: run.alive(name) for name in ("one", "two")}
    told = len(run.kubelet.history)
    for number in range(3):
        first = wait_for("one that acts", leader)
        both.pop(first).terminate()
        wait_for("the other one", lambda first=first: leader() not in ("", first))
        both[f"last-{number}"] = run.start_operator(identity=f"last-{number}")
    time.sleep(2.0)
    assert {name: run.alive(name) for name in ("one", "two")} == quiet, "no healthy worker is touched"
    assert run.kubelet.history[told:] == []
    check_no_pod_twice(run)
    print(f"{swaps + 3} leaders one after the other")


def test_the_operator_has_the_rights_that_are_documented_and_no_others(cluster: Cluster) -> None:
    allowed = {
        ("list", "trainingjobs"), ("patch", "trainingjobs/status"), ("list", "nodes"), ("list", "pods"),
        ("create", "pods"), ("delete", "pods"), ("create", "services"), ("create", "secrets"), ("create", "events"),
        ("list", "priorityclasses"), ("update", "trainingjobs/finalizers"), ("watch", "trainingjobs"),
        ("watch", "nodes"), ("watch", "pods"), ("watch", "priorityclasses"),
    }  # fmt: skip
    groups = {
        "trainingjobs": "edl-hvd.dev", "priorityclasses": "scheduling.k8s.io", "leases": "coordination.k8s.io",
        "deployments": "apps", "roles": "rbac.authorization.k8s.io",
    }  # fmt: skip
    kinds = {resource for _, resource in allowed} | {"configmaps", "deployments", "roles", "pods/exec", "leases"}
    for resource in sorted(kinds):
        group = groups.get(resource.partition("/")[0], "")
        for verb in ("get", "list", "watch", "create", "update", "patch", "delete"):
            name, _, sub = resource.partition("/")
            review = {
                "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
                "spec": {
                    "user": "system:serviceaccount:edl-hvd:operator",
                    "resourceAttributes": {
                        "namespace": "default", "verb": verb, "group": group, "resource": name, "subresource": sub,
                    },
                },
            }  # fmt: skip
            answer = cluster.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
            assert answer["status"]["allowed"] == ((verb, resource) in allowed), (verb, resource)
