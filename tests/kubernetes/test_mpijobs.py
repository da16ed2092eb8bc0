"""MPIJobs that share nodes with training jobs; the mpi-operator makes their pods, or a stand-in by their numbers."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, wait_for
from operator_run import Run, job

from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError

ASSETS = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
PATH = "/apis/kubeflow.org/v2beta1"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "mpijobs.kubeflow.org"},
    "spec": {
        "group": "kubeflow.org", "scope": "Namespaced",
        "names": {"kind": "MPIJob", "plural": "mpijobs", "singular": "mpijob", "listKind": "MPIJobList"},
        "versions": [
            {"name": "v2beta1", "served": True, "storage": True, "subresources": {"status": {}},
             "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
        ],
    },
}  # fmt: skip


def mpijob(name: str, replicas: int, least: object, most: object) -> dict[str, Any]:
    container = {"name": "worker", "image": "horovod", "resources": {"requests": {"cpu": "1"}}}
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
    launcher = {"spec": {"containers": [{"name": "launcher", "image": "horovod"}]}}
    notes = {"edl-hvd.dev/min-workers": str(least), "edl-hvd.dev/max-workers": str(most)}
    return {
        "apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": name, "annotations": notes},
        "spec": {
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": launcher},
                "Worker": {"replicas": replicas, "template": template},
            }
        },
    }  # fmt: skip


class StandIn:
    """Makes the workers of MPIJobs, and deletes those whose number is not below the replicas."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.api, self.namespace = cluster.api, namespace
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.ending.wait(0.1):
            with suppress(EdlHvdError):
                pods = list(self.api.list(f"/api/v1/namespaces/{self.namespace}/pods"))
                for one in self.api.list(f"{PATH}/namespaces/{self.namespace}/mpijobs"):
                    self.look(one, pods)

    def look(self, one: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        meta, worker = one["metadata"], one["spec"]["mpiReplicaSpecs"]["Worker"]
        folder = f"/api/v1/namespaces/{self.namespace}/pods"
        owner = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "name": meta["name"], "uid": meta["uid"],
                 "controller": True}  # fmt: skip
        mine = {pod["metadata"]["name"]: pod for pod in pods if pod["metadata"].get("ownerReferences") == [owner]}
        for number in range(worker["replicas"]):
            name = f"{meta['name']}-worker-{number}"
            if name not in mine:
                labels = {"training.kubeflow.org/job-role": "worker", "training.kubeflow.org/job-name": meta["name"]}
                made = {"apiVersion": "v1", "kind": "Pod", "spec": worker["template"]["spec"],
                        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]}}  # fmt: skip
                with suppress(ObjectExistsError):
                    self.api.create(folder, made)
        for name, pod in mine.items():
            if int(name.rpartition("-")[2]) >= worker["replicas"] and "deletionTimestamp" not in pod["metadata"]:
                with suppress(ObjectMissingError):
                    self.api.delete(f"{folder}/{name}", pod["metadata"]["uid"], None)

    def stop(self) -> None:
        self.ending.set()
        self.thread.join(60)


class RealOne:
    """Kubeflow's mpi-operator, as a process."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        log = open(cluster.folder / "mpi-operator.log", "wb")  # noqa: SIM115
        words = ("-kubeConfig", cluster.folder / "admin.json", "-namespace", namespace, "-lock-namespace", namespace)
        self.process = subprocess.Popen([ASSETS / "mpi-operator", *words], stdout=log, stderr=log)
        log.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(params=[StandIn, RealOne], ids=["stand-in", "mpi-operator"])
def mpi_operator(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[type[StandIn | RealOne]]:
    definition = CRD
    if request.param is RealOne:
        lacking = [name for name in ("mpi-operator", "mpijobs.yaml") if not (ASSETS / name).is_file()]
        if lacking:
            pytest.skip(f"no {' and '.join(lacking)}; docs/testing.md says how to make them")
        definition = yaml.safe_load((ASSETS / "mpijobs.yaml").read_text())
    rights = (files("edl_hvd.kubernetes") / "manifests" / "mpijobs.yaml").read_text(encoding="utf-8")
    cluster.kubectl("apply", "-f", "-", stdin=rights)
    cluster.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    cluster.wait_established("mpijobs.kubeflow.org")
    yield request.param
    cluster.kubectl("delete", "crd", "mpijobs.kubeflow.org")
    cluster.kubectl("delete", "-f", "-", stdin=rights)


def test_an_mpijob_gives_room_to_a_training_job_and_gets_it_back(
    mpi_operator: type[StandIn | RealOne], cluster: Cluster, make_run: Callable[..., Run]
) -> None:
    run = make_run({"a": 3, "b": 3}, has_operator=False)  # a launcher's tenth of a core takes a slot of one of them
    operator = mpi_operator(cluster, run.namespace)
    try:
        run.apply(mpijob("old", 1, 1, 4), mpijob("alone", 1, 1, 1), mpijob("bad", 0, 3, 2))
        run.kubectl("annotate", "mpijob/alone", "edl-hvd.dev/min-workers-", "edl-hvd.dev/max-workers-")
        run.start_operator(flags=("--mpijobs",))

        def running() -> int:
            pods = cluster.api.list(f"/api/v1/namespaces/{run.namespace}/pods")
            return sum(
                pod["metadata"]["name"].startswith("old-worker-") and pod["status"].get("phase") == "Running"
                and "deletionTimestamp" not in pod["metadata"] for pod in pods
            )  # fmt: skip

        def replicas(name: str = "old") -> int:
            path = f"{PATH}/namespaces/{run.namespace}/mpijobs/{name}"
            return int(cluster.api.get(path)["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"])

        wait_for("the idle room to be used", lambda: replicas() == running() == 4)
        run.apply(job("new", 2, 2))
        run.wait_running(2, "new")
        wait_for("what is left", lambda: replicas() == running() == 2)
        assert replicas("alone") == 1, "it did not ask"
        run.kubectl("delete", "tj/new")
        wait_for("the room again", lambda: replicas() == running() == 4)
        told = run.kubectl("get", "events", "-o", "jsonpath={range .items[*]}{.involvedObject.kind}/"
                           "{.involvedObject.name} {.reason} {.message}{'\\n'}{end}")  # fmt: skip
        assert "MPIJob/old Shrunk 4 → " in told
        assert "MPIJob/bad Refused" in told
        assert not re.search("MPIJob/alone (Grown|Shrunk|Refused)", told)
        found = cluster.api.get(f"{PATH}/namespaces/{run.namespace}/mpijobs/old")["metadata"]["annotations"]
        assert {"edl-hvd.dev/resized-at", "edl-hvd.dev/why"} <= found.keys()
    finally:
        operator.stop()
        run.kubectl("delete", "mpijob", "--all", "--wait=false", check=False)
