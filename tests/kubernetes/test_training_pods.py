"""A TrainingJob whose pods are processes: real workers train, and lose what a cluster loses."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from itertools import pairwise
from pathlib import Path

from cluster import Cluster, wait_for
from fake_kubelet import FakeKubelet
from operator_run import Run, job

SCRIPT = Path(__file__).parents[2] / "examples" / "minimal.py"
EPOCHS = 50


def test_a_job_is_scaled_loses_a_pod_and_outlives_operator_and_launcher(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    kubelet = FakeKubelet(cluster, {f"{namespace}-{name}": 2 for name in "ab"}, tmp_path / "pods", port)
    run = Run(cluster, namespace, kubelet)
    kubelet.start()
    made = job("minimal", 1, 2, checkpoint=f"file://{tmp_path}/checkpoints", family="minimal")
    container = made["spec"]["workers"]["template"]["spec"]["containers"][0]
    script = tmp_path / "minimal.py"
    script.write_text(SCRIPT.read_text().replace("state.epochs(20)", f"state.epochs({EPOCHS})"))
    container["command"] = [sys.executable, str(script)]
    container["env"] = [{"name": "EDL_HVD_CHECKPOINT_EVERY", "value": "1s"}]
    log = tmp_path / "pods" / "minimal-launcher.log"

    def epochs() -> list[tuple[int, int]]:
        text = log.read_text() if log.exists() else ""
        return [(int(one), int(two)) for one, two in re.findall(r"epoch (\d+): loss .*, workers (\d+)", text)]

    try:
        operator = run.start_operator()
        run.apply(made)
        wait_for("an epoch of two workers", lambda: 2 in dict(epochs()).values())
        run.kubectl("scale", "tj/minimal", "--replicas", "1")
        wait_for("an epoch of one", lambda: epochs()[-1][1] == 1)
        run.wait_running(1, "minimal")
        operator.kill()
        operator.wait(60)
        seen = len(epochs())
        wait_for("an epoch without operator", lambda: len(epochs()) > seen)
        run.kubectl("scale", "tj/minimal", "--replicas", "2")
        run.start_operator()
        run.wait_running(2, "minimal")
        wait_for("an epoch of two again", lambda: epochs()[-1][1] == 2)
        wait_for("its curve", lambda: {1, 2} <= set((run.status("minimal").get("measured") or {}).get("sizes", ())))
        lost = run.pods(name="minimal")[-1]["metadata"]["uid"]
        process = kubelet.running[lost]
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        wait_for("another pod", lambda: len(run.running_uids("minimal") - {lost}) == 2)
        [launcher] = run.pods("launcher", "minimal")
        process = kubelet.running[launcher["metadata"]["uid"]]
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        run.kubectl("wait", "tj/minimal", "--for=condition=Complete", "--timeout=300s")
        assert run.status("minimal")["launcher"]["failures"] == 1
        progress = run.status("minimal")["progress"]
        assert progress["left"] == "0s"
        assert progress["step"] > 0, "a launcher that has just begun knows no step, and takes none away"
        assert set(run.status("minimal")["measured"]["sizes"]) >= {1, 2}
        again = job("again", 1, 2)
        again["spec"] |= {"family": "minimal", "workers": made["spec"]["workers"]}
        run.apply(again)
        wait_for("what another has measured", lambda: (run.status("again").get("measured") or {}).get("sizes"))
        assert set(run.status("again")["measured"]["sizes"]) >= {1, 2, 4}, "it has not had more than two workers"
        [launcher] = run.pods("launcher", "again")
        assert "EDL_HVD_FAMILY_TIMINGS" in [one["name"] for one in launcher["spec"]["containers"][0]["env"]]
        shown = run.kubectl("get", "tj", "-o", "wide")
        assert "LEFT" in shown
        assert "SAMPLES/S" in shown
        numbers = [number for number, _ in epochs()]
        missing = set(range(1, EPOCHS + 1)) - set(numbers)
        assert len(missing) <= 1, "only a line that was printed while no launcher was there can be lost"
        assert EPOCHS in numbers
        assert sum(after <= before for before, after in pairwise(numbers)) <= 1, (
            "only the end of the launcher went back, to a checkpoint"
        )
    finally:
        for one in run.operators:
            one.kill()
            one.wait(60)
        run.kubectl("delete", "tj", "--all", "--wait=false", check=False)
        kubelet.stop()
