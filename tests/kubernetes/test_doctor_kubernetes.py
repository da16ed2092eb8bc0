"""``edl-hvd doctor --kubernetes``: clusters with and without what jobs need, users with and without rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, wait_for
from operator_run import Run

from edl_hvd.kubernetes.checks import check_cluster

EDL_HVD = str(Path(sys.executable).with_name("edl-hvd"))


def test_a_cluster_is_looked_at_as_its_user_sees_it(
    cluster: Cluster, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(name: str) -> dict[str, tuple[str, str]]:
        """Verdict and text of each finding of a user."""
        monkeypatch.setenv("KUBECONFIG", str(cluster.folder / name))
        return {one.subject: (one.verdict, f"{one.found} -> {one.fix}") for one in check_cluster()}

    run = make_run({"a": 2})
    wait_for("an operator", lambda: findings("admin.json")["operator"][0] == "ok")
    found = findings("admin.json")
    assert {subject: verdict for subject, (verdict, _) in found.items()} == dict.fromkeys(
        ("cluster", "TrainingJob", "priorities", "operator", "rights"), "ok"
    )
    assert "edl-hvd.dev/v1alpha1 is served" in found["TrainingJob"][1]
    nobody = cluster.config("nobody-token", "nobody.json")
    assert findings("nobody.json")["rights"][0] == "missing"
    assert "may not create or list or delete trainingjobs in namespace" in findings("nobody.json")["rights"][1]
    gone = json.loads(nobody.read_text())
    gone["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (cluster.folder / "away.json").write_text(json.dumps(gone))
    assert list(findings("away.json")) == ["cluster"]
    assert "the API server does not answer" in findings("away.json")["cluster"][1]
    kept = run.kubectl("get", "priorityclass", "edl-hvd-extra", "-o", "json")
    run.kubectl("delete", "priorityclass", "edl-hvd-extra")
    try:
        verdict, text = findings("admin.json")["priorities"]
    finally:
        run.kubectl("create", "-f", "-", stdin=kept)
    assert verdict == "missing"
    assert "no PriorityClass edl-hvd-extra -> run: edl-hvd operator --manifests" in text


def test_the_doctor_shows_it(cluster: Cluster) -> None:
    environment = {**os.environ, "KUBECONFIG": str(cluster.folder / "admin.json")}
    words = [EDL_HVD, "doctor", "--kubernetes", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    subjects = [one["subject"] for one in json.loads(done.stdout) if one["group"] == "Kubernetes"]
    assert subjects == ["cluster", "TrainingJob", "priorities", "operator", "rights"]
