"""One control plane for all tests here, with the operator's manifests; a namespace for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from cluster import Cluster, missing, wait_for
from fake_kubelet import FakeKubelet
from kueue_run import Kueue, without_kueue
from operator_run import Run

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        made.install_operator()
        made.config("nobody-token", "nobody.json")
        yield made
    finally:
        made.stop()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"test-{next(_NUMBERS)}"
    cluster.kubectl("create", "namespace", name)
    wait_for(
        "the account of pods", lambda: cluster.kubectl("-n", name, "get", "sa", "default", "-o", "name", check=False)
    )
    yield name
    cluster.kubectl("-n", name, "delete", "tj", "--all")
    cluster.kubectl("-n", name, "delete", "pod,deployment", "--all", "--grace-period=0", "--force", check=False)


@pytest.fixture
def kueue(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Kueue]:
    if reason := without_kueue():
        pytest.skip(reason)
    made = Kueue(cluster, namespace, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def make_run(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(nodes: dict[str, int], has_operator: bool = True) -> Run:
        kubelet = FakeKubelet(cluster, {f"{namespace}-{name}": cores for name, cores in nodes.items()})
        run = Run(cluster, namespace, kubelet)
        made.append(run)
        kubelet.start()
        wait_for(
            "nodes without taints", lambda: "node.kubernetes.io" not in cluster.kubectl("get", "nodes", "-o", "yaml")
        )
        if has_operator:
            run.start_operator()
        return run

    yield make
    for run in made:
        for operator in run.operators:
            operator.kill()
            operator.wait(60)
        run.kubectl("delete", "tj", "--all", "--wait=false", check=False)
        run.kubectl("delete", "pod,deployment", "--all", "--grace-period=0", "--force", check=False)
        run.kubelet.stop()
