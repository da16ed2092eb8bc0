"""A namespace of the test cluster with an operator, and the jobs that tests give it."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from cluster import Cluster, wait_for
from fake_kubelet import FakeKubelet

JOB: dict[str, Any] = {
    "apiVersion": "edl-hvd.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "resnet"},
    "spec": {
        "workers": {
            "min": 1, "max": 4,
            "template": {
                "spec": {
                    "terminationGracePeriodSeconds": 10,
                    "containers": [
                        {
                            "name": "main", "image": "training", "command": ["python", "train.py"],
                            "resources": {"requests": {"cpu": "1"}},
                        }
                    ],
                }
            },
        }
    },
}  # fmt: skip


def job(name: str = "resnet", least: object = 1, most: object = 4, cpu: str = "1", **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(JOB))
    made["metadata"]["name"] = name
    made["spec"]["workers"].update(min=least, max=most)
    made["spec"]["workers"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu
    made["spec"].update(spec)
    return made


class Run:
    """A namespace with an operator, and nodes whose pods are puppets."""

    def __init__(self, cluster: Cluster, namespace: str, kubelet: FakeKubelet) -> None:
        self.cluster, self.namespace, self.kubelet = cluster, namespace, kubelet
        self.operators: list[subprocess.Popen[bytes]] = []

    def start_operator(
        self, config: str = "operator.json", identity: str = "one", flags: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        self.operators.append(self.cluster.operator("--identity", identity, *flags, config=config))
        return self.operators[-1]

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin, check=check)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def seen(self, name: str = "resnet") -> dict[str, Any]:
        path = f"/apis/edl-hvd.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs/{name}"
        return self.cluster.api.get(path)

    def status(self, name: str = "resnet") -> dict[str, Any]:
        found: dict[str, Any] = self.seen(name).get("status") or {}
        return found

    def condition(self, kind: str, name: str = "resnet") -> tuple[str, str]:
        found = {one["type"]: (one["status"], one["reason"]) for one in self.status(name).get("conditions") or []}
        return found.get(kind, ("", ""))

    def pods(self, role: str = "worker", name: str = "resnet") -> list[dict[str, Any]]:
        return [
            pod for pod in self.cluster.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
            if (pod["metadata"].get("labels") or {}).get("edl-hvd.dev/role") == role
            and pod["metadata"]["labels"]["edl-hvd.dev/job"] == name
        ]  # fmt: skip

    def alive(self, name: str = "resnet") -> set[str]:
        found = (pod["metadata"] for pod in self.pods(name=name))
        return {meta["uid"] for meta in found if "deletionTimestamp" not in meta}

    def running_uids(self, name: str = "resnet") -> set[str]:
        return {
            pod["metadata"]["uid"] for pod in self.pods(name=name)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }  # fmt: skip

    def running(self, name: str = "resnet") -> int:
        return len(self.running_uids(name))

    def wait_running(self, count: int, name: str = "resnet") -> None:
        def is_so() -> bool:
            workers = self.status(name).get("workers") or {}
            return self.running(name) == count == workers.get("running") == workers.get("desired")

        wait_for(f"{count} workers of {name}", is_so)

    def wait_settled(self, *names: str) -> None:
        """Wait until each job runs what it shall have by its present spec, and then changes no more."""
        kept: list[Any] = []

        def is_known(item: dict[str, Any]) -> bool:
            """An operator that has just been started may not have looked yet."""
            found = (item.get("status") or {}).get("conditions") or []
            return any(one.get("observedGeneration") == item["metadata"]["generation"] for one in found)

        def is_so() -> bool:
            items = {name: self.seen(name) for name in names}
            if not all(map(is_known, items.values())):
                return False
            seen = {name: item["status"] for name, item in items.items()}
            now = [{name: (one.get("placed"), self.alive(name)) for name, one in seen.items()}]
            workers = {name: one.get("workers") or {} for name, one in seen.items()}
            is_whole = all(self.running(name) == workers[name].get("desired") for name in names)
            kept[:] = [*kept, *now] if is_whole and kept[-1:] in ([], now) else []
            time.sleep(0.5)
            return len(kept) > 10

        try:
            wait_for(f"{', '.join(names)} to settle", is_so)
        except AssertionError as error:
            there = self.kubectl("get", "pods,tj", "-o", "wide"), [self.status(name) for name in names]
            raise AssertionError(f"{error}: {there}; {self.kubelet.history[-20:]}; {self.kubelet.errors}") from None

    def events(self) -> list[str]:
        return [one["reason"] for one in self.cluster.api.list(f"/api/v1/namespaces/{self.namespace}/events")]


def check_no_pod_twice(run: Run) -> None:
    """No name at two places at once, and nothing started twice."""
    at_once: dict[str, str] = {}
    for what, name, uid in run.kubelet.history:
        if what == "runs":
            assert name not in at_once, f"{name} runs twice at once"
            at_once[name] = uid
        elif what == "gone":
            at_once.pop(name, None)
    starts = [uid for what, _, uid in run.kubelet.history if what == "runs"]
    assert len(starts) == len(set(starts))
