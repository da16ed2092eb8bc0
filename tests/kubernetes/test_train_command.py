"""``edl-hvd train --kubernetes`` on a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

from cluster import Cluster, wait_for
from operator_run import Run


def train(run: Run, *words: str, config: str = "admin.json") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edl_hvd.cli.main", "train", "--kubernetes", "--image", "training", *words]
    environment = {**os.environ, "KUBECONFIG": str(run.cluster.folder / config)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_job_is_submitted_with_one_command_and_runs(make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 4})
    words = ("--namespace", run.namespace, "--min", "2", "--max", "3", "--env", "A=b", "train.py", "--epochs", "9")
    done = train(run, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"TrainingJob {run.namespace}/train is submitted" in done.stdout
    run.wait_running(3, "train")
    assert run.condition("Accepted", "train") == ("True", "Valid")
    [launcher] = run.pods("launcher", "train")
    assert launcher["spec"]["containers"][0]["command"][-4:] == ["python", "train.py", "--epochs", "9"]
    run.kubectl("wait", "tj/train", "--for=condition=Running", "--timeout=180s")
    again = train(run, *words)
    assert again.returncode == 2
    assert f"there is a TrainingJob train in namespace {run.namespace} already" in again.stderr
    refused = train(run, *words, config="nobody.json")
    assert refused.returncode == 1
    assert "ask for the role 'edit'" in refused.stderr
    nowhere = train(run, "--namespace", "no-such-namespace", "train.py")
    assert nowhere.returncode == 1
    assert "expected a namespace that exists" in nowhere.stderr


def test_what_a_cluster_with_an_older_kind_of_job_drops_is_said(cluster: Cluster, make_run: Callable[..., Run]) -> None:
    run = make_run({"a": 4})
    kind = json.loads(cluster.kubectl("get", "crd", "trainingjobs.edl-hvd.dev", "-o", "json"))
    older = json.loads(json.dumps(kind))
    for one in (kind, older):
        del one["metadata"]["resourceVersion"]
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["family"]

    def submitted() -> str:
        cluster.kubectl("-n", run.namespace, "delete", "tj", "train", "--ignore-not-found")
        done = train(run, "--namespace", run.namespace, "--family", "text", "train.py")
        assert done.returncode == 0, done.stderr
        return done.stderr

    try:
        cluster.kubectl("replace", "-f", "-", stdin=json.dumps(older))
        wait_for("an API server that drops the field", lambda: "has dropped spec.family" in submitted())
    finally:
        cluster.kubectl("replace", "-f", "-", stdin=json.dumps(kind))
    wait_for("one that keeps it", lambda: submitted() == "")
    assert json.loads(run.kubectl("get", "tj", "train", "-o", "json"))["spec"]["family"] == "text"
