"""``edl-hvd discover`` and ``edl-hvd doctor --discover``, as real processes against real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from discovery_clusters import KubernetesScene
from kubernetes_server import deleted, pod
from waiting import soon

from edl_hvd.doctor import outside
from edl_hvd.doctor.findings import MISSING, OK

COMMAND = [sys.executable, "-m", "edl_hvd.cli.main"]


def discover(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run([*COMMAND, "discover", *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesScene]:
    made = KubernetesScene(tmp_path)
    yield made
    made.close()


def source_of(cluster: KubernetesScene) -> str:
    folder = cluster.folder
    return (
        f"kubernetes:selector=app=trainer,namespace=training,server={cluster.server.url},"
        f"token-file={folder}/token,ca-file={folder}/ca.crt"
    )


def test_hosts_are_a_table_with_what_is_left_out_and_why(tmp_path):
    (tmp_path / "a.txt").write_text("node-1:4\nnode-2:4\n")
    (tmp_path / "b.txt").write_text("node-3:4\n")
    done = discover("limit(union(file:a.txt, file:b.txt), 8)", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()[:4]] == [
        ["host", "slots"], ["node-1", "4"], ["node-2", "4"], ["2", "hosts,", "8", "slots"]]  # fmt: skip
    assert "node-3  limit(..., 8) has its 8 slots" in done.stdout


def test_the_details_of_pods_are_json(cluster):
    cluster.server.pods = [pod("w1", "10.0.0.1"), deleted(pod("w2", "10.0.0.2"), 30)]
    done = discover("--json", source_of(cluster), folder=cluster.folder)
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert told["hosts"] == [{"host": "10.0.0.1", "slots": 4, "zone": "node-of-w1", "since_s": 1769860800.0}]
    assert told["left_out"]["w2"].startswith("it is being deleted")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("file:none.txt", 1, "cannot read the hosts file none.txt"),
        ("schedule:late.txt", 1, "there are no hosts"),
        ("union(file:none.txt, fil:b)", 2, "at the mark in 'union(file:none.txt, >>>fil:b)'"),
        ("file:none.txt,zone=a", 2, "unknown flag '--zone=a'"),
    ],
)
def test_what_gives_no_hosts_is_one_line_and_an_exit_code(tmp_path, source, code, words):
    (tmp_path / "late.txt").write_text("1h add node-1\n")
    done = discover(source, folder=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_watching_prints_a_line_for_each_change(tmp_path):
    hosts, part = tmp_path / "hosts.txt", tmp_path / "part"
    hosts.write_text("node-1:4\n")
    # Whatever a shell starts in the background ignores Ctrl-C, and so would this.
    heeding = ["env", "--default-signal=INT", *COMMAND]
    process = subprocess.Popen(
        [*heeding, "discover", "--watch", "file:hosts.txt"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().split(maxsplit=1)[1] == "+ node-1:4\n"
        part.write_text("node-2:8\n")
        part.replace(hosts)
        assert process.stdout.readline().split(maxsplit=1)[1] == "+ node-2:8\n"
        assert process.stdout.readline().split(maxsplit=1)[1] == "- node-1:4\n"
    finally:
        process.send_signal(signal.SIGINT)
        soon(process)
        process.stdout.close()
    assert process.returncode == 0


def test_the_doctor_names_the_permission_that_is_missing(cluster):
    cluster.server.pods = [pod("w1", "10.0.0.1")]
    assert [finding.verdict for finding in outside.check_source(source_of(cluster))] == [OK, OK, OK]
    cluster.server.behave("not allowed")
    token, listing, source = outside.check_source(source_of(cluster))
    assert (token.verdict, listing.verdict, source.verdict) == (OK, MISSING, MISSING)
    assert listing.found.startswith("list pods in namespace training: ")
    assert "allow its service account to list pods" in listing.found
