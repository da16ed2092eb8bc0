"""The chart, rendered by Helm's own library: what 'edl-hvd operator --manifests' prints, with a release's values."""

from __future__ import annotations

import importlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

import edl_hvd

CHART = Path(__file__).parents[3] / "charts" / "edl-hvd"
# Its packages are for a few platforms only.
helm: Any = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: nothing renders the chart")

Manifests = dict[tuple[str, str], dict[str, Any]]


def by_name(text: str) -> Manifests:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


def rendered(**values: Any) -> Manifests:
    with helm.Chart.load(str(CHART)) as chart:
        return by_name("---\n".join(chart.render(values, name="mine", namespace="training").values()))


@pytest.fixture
def plain() -> Manifests:
    return by_name((files("edl_hvd.kubernetes") / "manifests" / "operator.yaml").read_text(encoding="utf-8"))


def test_the_chart_has_the_objects_of_the_manifests(plain: Manifests) -> None:
    made = rendered(image="registry/operator")
    assert made.keys() | {("Namespace", "edl-hvd")} == plain.keys()
    for key, one in made.items():
        expected = plain[key]
        if "namespace" in expected["metadata"]:
            expected["metadata"]["namespace"] = "training"
        for subject in expected.get("subjects", []):
            subject["namespace"] = "training"
        if key[0] == "CustomResourceDefinition":
            expected["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
        if key[0] == "Deployment":
            container = expected["spec"]["template"]["spec"]["containers"][0]
            container["image"] = "registry/operator"
            container["command"] += ["--namespace", "training"]
        assert one == expected


def test_values_change_the_deployment() -> None:
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}}
    made = rendered(
        image="i", replicas=2, resources=resources, metricsPort=9400, nodeSelector={"pool": "system"},
        imagePullSecrets=[{"name": "key"}], tolerations=[{"operator": "Exists"}],
    )  # fmt: skip
    spec = made["Deployment", "operator"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["replicas"] == 2
    assert (pod["nodeSelector"], pod["imagePullSecrets"], pod["tolerations"]) == (
        {"pool": "system"}, [{"name": "key"}], [{"operator": "Exists"}]
    )  # fmt: skip
    container = pod["containers"][0]
    assert container["resources"] == resources
    assert container["command"][-2:] == ["--metrics-port", "0.0.0.0:9400"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9400}]


def test_mpijobs_bring_their_rights_and_the_flag() -> None:
    with_them, without = rendered(image="i", mpijobs=True), rendered(image="i")
    assert {name for _, name in with_them.keys() - without.keys()} == {"edl-hvd-operator-mpijobs"}
    [subject] = with_them["ClusterRoleBinding", "edl-hvd-operator-mpijobs"]["subjects"]
    assert subject["namespace"] == "training"
    container = with_them["Deployment", "operator"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["edl-hvd", "operator", "--namespace", "training", "--mpijobs"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "/image"),
        ({"image": "i", "replica": 2}, "'replica' not allowed"),
        ({"image": "i", "replicas": "two"}, "/replicas"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], problem: str) -> None:
    error = importlib.import_module("helm_python.errors").HelmValuesError
    with pytest.raises(error, match=problem):
        rendered(**values)


def test_the_chart_is_of_this_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == edl_hvd.__version__
