"""The kubelets of all nodes: pods run as nothing at all (puppets), or as processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster import Cluster

from edl_hvd.errors import EdlHvdError, ObjectExistsError
from edl_hvd.kubernetes.pods import AGENTS_PORT, TOKEN_FOLDER

_NETWORK = 2 + os.getpid() % 250
# Of the pods: an operator asks launchers at their addresses, and another run beside this one has launchers, too.
_LOOK_S, _BEAT_S, _PUPPET_LEAVES_S = 0.1, 5.0, 0.3


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


class FakeKubelet:
    """Registers nodes, runs the pods that the scheduler binds to them, and ends them with their grace.

    Args:
        cluster: The control plane.
        nodes: Cores of each node.
        processes: Folder for the processes of pods; ``None``: puppets.
        agents_port: Port that takes the place of the launcher's.
    """

    def __init__(
        self, cluster: Cluster, nodes: dict[str, int], processes: Path | None = None, agents_port: int = 0
    ) -> None:
        self.cluster, self.nodes, self.folder, self.agents_port = cluster, nodes, processes, agents_port
        self.history: list[tuple[str, str, str]] = []
        self.errors: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes] | None] = {}
        self.look_s = _LOOK_S
        self._ending = threading.Event()
        self._leaving: dict[str, float] = {}
        self._gone: set[str] = set()
        self._addresses: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        for name, cores in self.nodes.items():
            meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
            with suppress(ObjectExistsError):
                self.cluster.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
            self._beat(name, cores)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(60)
        for process in self.running.values():
            if process is not None and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
        for name in self.nodes:
            with suppress(EdlHvdError):
                node = self.cluster.api.get(f"/api/v1/nodes/{name}")
                self.cluster.api.delete(f"/api/v1/nodes/{name}", node["metadata"]["uid"], 0)

    def finish(self, path: str, code: int) -> None:
        """End a puppet with an exit code."""
        self._ended(path, code)

    def _beat(self, name: str, cores: int) -> None:
        room = {"cpu": str(cores), "memory": "64Gi", "pods": "500"}
        ready = {
            "type": "Ready", "status": "True", "reason": "Fake", "message": "", "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }  # fmt: skip
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.cluster.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})

    def _run(self) -> None:
        beat_s = 0.0
        while not self._ending.wait(self.look_s):
            try:
                if time.monotonic() - beat_s > _BEAT_S:
                    for name, cores in self.nodes.items():
                        self._beat(name, cores)
                    beat_s = time.monotonic()
                for pod in self.cluster.api.list("/api/v1/pods"):
                    if pod["spec"].get("nodeName") in self.nodes:
                        self._look(pod)
            except EdlHvdError as error:
                self.errors.append(str(error))

    def _look(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        uid, path = meta["uid"], f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        process = self.running.get(uid)
        if "deletionTimestamp" in meta:
            if uid not in self._leaving:
                grace_s = meta.get("deletionGracePeriodSeconds", 30)
                self._leaving[uid] = time.monotonic() + (grace_s if process else min(grace_s, _PUPPET_LEAVES_S))
                self.history.append(("leaves", meta["name"], uid))
                if process is not None and process.poll() is None:
                    process.terminate()
            if process is not None and process.poll() is None:
                if time.monotonic() < self._leaving[uid]:
                    return
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
            elif process is None and time.monotonic() < self._leaving[uid]:
                return
            if uid not in self._gone:
                self._gone.add(uid)
                if pod["status"].get("phase") == "Running":
                    is_launcher = (meta.get("labels") or {}).get("edl-hvd.dev/role") == "launcher"
                    code = (75 if is_launcher else 0) if process is None else process.returncode
                    self._ended(path, code if code >= 0 else 128 - code)
                self.history.append(("gone", meta["name"], uid))
            self.cluster.api.delete(path, uid, 0)
        elif pod["status"].get("phase") == "Pending":
            if uid not in self.running:
                self._addresses[uid] = self._next_address()
                self.running[uid] = self._start(pod, self._addresses[uid]) if self.folder is not None else None
                self.history.append(("runs", meta["name"], uid))
            address = self._addresses[uid]  # what follows is done again where the API server did not take it
            states = [{"running": {"startedAt": now()}}]
            ready = [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")]
            status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready}
            self._write(path, pod, status, states)
        elif process is not None and process.poll() is not None and pod["status"].get("phase") == "Running":
            self._ended(path, process.returncode if process.returncode >= 0 else 128 - process.returncode)

    def _next_address(self) -> str:
        number = 2 + len(self._addresses)
        return f"127.{_NETWORK}.{number // 250}.{number % 250 + 1}"

    def _ended(self, path: str, code: int) -> None:
        pod = self.cluster.api.get(path)
        self.history.append((f"ends {code}", pod["metadata"]["name"], pod["metadata"]["uid"]))
        end = {"exitCode": code, "finishedAt": now(), "reason": "Error" if code else "Completed"}
        self._write(path, pod, {"phase": "Failed" if code else "Succeeded"}, [{"terminated": end}])

    def _write(self, path: str, pod: dict[str, Any], status: dict[str, Any], states: list[dict[str, Any]]) -> None:
        first = pod["spec"]["containers"][0]
        containers = [
            {"name": first["name"], "image": first["image"], "imageID": "", "restartCount": 0, "ready": True,
             "state": state} for state in states
        ]  # fmt: skip
        self.cluster.api.patch(f"{path}/status", {"status": {**status, "containerStatuses": containers}})

    def _start(self, pod: dict[str, Any], address: str) -> subprocess.Popen[bytes] | None:
        """The first container of a training pod as a process; pods of others are puppets."""
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        if not any(one.get("mountPath") == TOKEN_FOLDER for one in container.get("volumeMounts") or []):
            return None
        assert self.folder is not None
        folder = self.folder / meta["uid"]
        folder.mkdir(parents=True)
        secret = next(one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one)
        found = self.cluster.kubectl(
            "-n", meta["namespace"], "get", "secret", secret, "-o", "go-template={{.data.token | base64decode}}"
        )
        (folder / "token").write_text(found)
        environment = {**os.environ}
        for one in container.get("env") or []:
            environment[one["name"]] = address if "valueFrom" in one else one["value"]
        name = secret.removesuffix("-token")
        known = {
            f"{name}-launcher.{meta['namespace']}.svc:{AGENTS_PORT}": f"127.0.0.1:{self.agents_port}",
            f"{TOKEN_FOLDER}/token": str(folder / "token"),
            str(AGENTS_PORT): str(self.agents_port),
        }  # fmt: skip
        command = [
            known.get(word) or re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), word)
            for word in container["command"]
        ]
        modules = {"edlrun": "edl_hvd.cli.edlrun", "edl-hvd": "edl_hvd.cli.main"}
        command[:1] = [sys.executable, "-m", modules[command[0]]]
        with open(self.folder / f"{meta['name']}.log", "ab") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
