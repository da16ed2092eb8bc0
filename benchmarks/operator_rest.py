"""What the operator costs while nothing is to be done: requests to the API server, and processor time.

    KUBEBUILDER_ASSETS=FOLDER python benchmarks/operator_rest.py [--seconds 60] [--others 1000]

It starts a control plane as the tests of the operator do (tests/kubernetes), with three jobs on four nodes whose pods
are puppets. Then it counts for some time, creates pods of others, which no scheduler looks at, counts again, and
changes each of these pods once.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kubernetes"))

from cluster import Cluster, wait_for
from fake_kubelet import FakeKubelet
from operator_run import Run, job

NAMESPACE = "rest"
JOBS = ("one", "two", "three")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to count (default 60)")
    parser.add_argument("--others", type=int, default=1000, help="number of pods of others (default 1000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            measure(cluster, arguments.seconds, arguments.others)
        finally:
            cluster.stop()


def measure(cluster: Cluster, seconds: float, others: int) -> None:
    operator_command = (sys.executable, "-m", "edl_hvd.cli.main", "operator")
    manifests = subprocess.run((*operator_command, "--manifests"), capture_output=True, text=True, check=True).stdout
    cluster.kubectl("apply", "-f", "-", stdin=manifests)
    cluster.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.edl-hvd.dev", "--timeout=180s")
    cluster.kubectl("-n", "edl-hvd", "scale", "deployment/operator", "--replicas", "0")
    cluster.kubectl("create", "namespace", NAMESPACE)
    account = ("-n", NAMESPACE, "get", "sa", "default", "-o", "name")
    wait_for("the account of pods", lambda: cluster.kubectl(*account, check=False).startswith("service"))
    kubelet = FakeKubelet(cluster, {f"node-{number}": 4 for number in range(4)})
    kubelet.start()
    wait_for("nodes", lambda: "node.kubernetes.io" not in cluster.kubectl("get", "nodes", "-o", "yaml"))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = {**os.environ, "KUBECONFIG": str(cluster.folder / "admin.json")}
    operator = subprocess.Popen((*operator_command, "--metrics-port", str(port)), env=environment)
    try:
        run = Run(cluster, NAMESPACE, kubelet)
        run.apply(*(job(name, 1, 3) for name in JOBS))
        for name in JOBS:
            run.wait_running(3, name)
        kubelet.look_s = 5.0  # the nodes stay ready
        time.sleep(5)
        count(operator.pid, port, seconds, "3 jobs at rest")
        folder = f"/api/v1/namespaces/{NAMESPACE}/pods"
        for number in range(others):
            cluster.api.create(folder, other_pod(number))
        time.sleep(5)
        count(operator.pid, port, seconds, f"with {others} pods of others")
        before, turns, began_s = processor_s(operator.pid), requests(port)["turns"], time.monotonic()
        for number in range(others):
            cluster.api.patch(f"{folder}/web-{number}", {"metadata": {"annotations": {"note": str(number)}}})
        took_s = time.monotonic() - began_s
        time.sleep(2)
        used_s = processor_s(operator.pid) - before
        print(f"{others} changes of these in {took_s:.1f} s: {used_s:.2f} s of a core, "
              f"{requests(port)['turns'] - turns} turns")  # fmt: skip
    finally:
        operator.kill()
        operator.wait(60)
        kubelet.stop()


def other_pod(number: int) -> dict[str, object]:
    container = {
        "name": "main", "image": "web", "resources": {"requests": {"cpu": "100m"}},
        "env": [{"name": f"VARIABLE_{one}", "value": "x" * 40} for one in range(10)],
    }  # fmt: skip
    meta = {"name": f"web-{number}", "labels": {"app": "web"}}
    spec = {"schedulerName": "none", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def count(pid: int, port: int, seconds: float, what: str) -> None:
    before, used_s, began_s = requests(port), processor_s(pid), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    more = requests(port) - before
    rates = ", ".join(f"{name} {number / took_s:.2f}" for name, number in sorted(more.items()))
    memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert memory is not None
    print(f"{what}: per second {rates}; {100 * (processor_s(pid) - used_s) / took_s:.2f} % of a core, "
          f"{int(memory[1]) / 1024:.0f} MiB; load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip


def requests(port: int) -> Counter[str]:
    """Requests so far by verb, and turns."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = Counter[str]()
    for line in text.splitlines():
        if match := re.fullmatch(r'edl_hvd_operator_api_requests_total\{.*verb="(\w+)"\} (\S+)', line):
            found[match[1]] += int(float(match[2]))
        elif match := re.fullmatch(r"edl_hvd_operator_turns_total (\S+)", line):
            found["turns"] += int(float(match[1]))
    return found


def processor_s(pid: int) -> float:
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
