"""A control plane on this machine: etcd, API server, scheduler and controller manager, from KUBEBUILDER_ASSETS."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from edl_hvd.kubernetes.api import ApiServer

PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
_FIRST_PORT = 2_000 + 500 * (os.getpid() % 20)
# Below those of teachers (tests/support/fleet.py); processes that are started side by side have others.
_PORTS = cycle(range(_FIRST_PORT, _FIRST_PORT + 500))
LONGEST_S = 180.0
# Of last resort: it decides no test that goes well.


def wait_for(what: str, is_so: Callable[[], Any], within_s: float = LONGEST_S) -> Any:
    """Wait until a condition holds; its value."""
    ends_s = time.monotonic() + within_s
    while not (value := is_so()):
        assert time.monotonic() < ends_s, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.05)
    return value


def missing() -> str:
    """Why no control plane can be started here; empty if one can."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        return "KUBEBUILDER_ASSETS is not set: no kube-apiserver to test with"
    lacking = [name for name in PROGRAMS if not Path(assets, name).is_file()]
    lacking += [name for name in ("kubectl", "openssl") if not shutil.which(name)]
    return f"missing: {', '.join(lacking)}" if lacking else ""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no connection and no other process of tests is given."""
    found: list[int] = []
    for port in _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


@dataclass
class Cluster:
    """A control plane, and kubectl for it."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, requests_per_s: int = 0) -> None:
        """Start the control plane, and wait until it makes service accounts.

        Args:
            requests_per_s: What the scheduler and the controller manager may ask the API server for; 0: their defaults.
        """
        assets = Path(os.environ["KUBEBUILDER_ASSETS"])
        old = " v1.20." in subprocess.run(
            [assets / "kube-apiserver", "--version"], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
        etcd, peer, self.port, scheduler, manager = free_ports(5)
        subprocess.run(["openssl", "genrsa", "-out", self.folder / "sa.key", "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(
            'admin-token,admin,1,"system:masters"\nnobody-token,nobody,2,"nobodies"\n'
        )
        config = self.config("admin-token", "admin.json")
        url = f"http://127.0.0.1:{etcd}"
        self._launch(
            assets / "etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", url,
            "--advertise-client-urls", url, "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer}", "--log-level", "error", "--unsafe-no-fsync",
        )  # fmt: skip
        self._api_command: tuple[object, ...] = (
            assets / "kube-apiserver", "--etcd-servers", url, "--secure-port", self.port, "--bind-address",
            "127.0.0.1", "--cert-dir", self.folder / "pki", "--token-auth-file", self.folder / "tokens.csv",
            "--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.96.0.0/16",
            "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", self.folder / "sa.key",
            "--service-account-signing-key-file", self.folder / "sa.key", "--endpoint-reconciler-type", "none",
        )  # fmt: skip
        self._launch(*self._api_command)
        wait_for("API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok")
        both = ("--kubeconfig", config, "--leader-elect=false", *(("--port", "0") if old else ()))
        if requests_per_s:
            both = (*both, "--kube-api-qps", str(requests_per_s), "--kube-api-burst", str(2 * requests_per_s))
        self._launch(assets / "kube-scheduler", *both, "--secure-port", scheduler, "--cert-dir", self.folder / "s")
        self._launch(
            assets / "kube-controller-manager", *both, "--secure-port", manager, "--cert-dir", self.folder / "m",
            "--service-account-private-key-file", self.folder / "sa.key", "--use-service-account-credentials=true",
            "--root-ca-file", self.folder / "pki" / "apiserver.crt",
        )  # fmt: skip
        account = ("get", "sa", "default", "-o", "name")
        wait_for("service accounts", lambda: self.kubectl(*account, check=False).startswith("service"))
        self.api = self.client("admin.json")

    def install_operator(self) -> None:
        """Apply the operator's manifests, without its Deployment, and write a kubeconfig of its service account."""
        command = [sys.executable, "-m", "edl_hvd.cli.main", "operator", "--manifests"]
        manifests = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.kubectl("apply", "-f", "-", stdin=manifests)
        self.wait_established("trainingjobs.edl-hvd.dev")
        self.kubectl("-n", "edl-hvd", "scale", "deployment/operator", "--replicas", "0")
        self.config(self.account_token("edl-hvd", "operator"), "operator.json")

    def wait_established(self, name: str) -> None:
        """Wait for a definition of resources; ``kubectl wait`` fails where it has no conditions yet."""
        path = '{.status.conditions[?(@.type=="Established")].status}'
        words = ("get", "crd", name, "-o", f"jsonpath={path}")
        wait_for(name, lambda: self.kubectl(*words, check=False) == "True")

    def account_token(self, namespace: str, account: str) -> str:
        """A token of a service account, for a day."""
        words = ("-n", namespace, "get", "sa", account, "-o", "name")
        wait_for("the account", lambda: self.kubectl(*words, check=False).startswith("service"))
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        answer = self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(asked))
        return str(json.loads(answer)["status"]["token"])

    def restart_api_server(self) -> None:
        """Kill the API server, and start it again on the data that it had."""
        process = self.processes.pop(1)
        process.kill()
        process.wait(60)
        self._launch(*self._api_command)
        self.processes.insert(1, self.processes.pop())
        wait_for("API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok")

    def config_by(self, url: str, base: str = "operator.json") -> str:
        """The name of a kubeconfig, by another way to the API server."""
        made = json.loads((self.folder / base).read_text())
        made["clusters"][0]["cluster"]["server"] = url
        name = f"by-{url.rpartition(':')[2]}-{base}"
        (self.folder / name).write_text(json.dumps(made))
        return name

    def config(self, token: str, name: str) -> Path:
        """A kubeconfig of a user."""
        place = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        path = self.folder / name
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "test",
                    "clusters": [{"name": "test", "cluster": place}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "users": [{"name": "test", "user": {"token": token}}],
                }
            )
        )  # fmt: skip
        return path

    def client(self, config: str) -> ApiServer:
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self.folder / config)
        try:
            return ApiServer()
        finally:
            os.environ.pop("KUBECONFIG")
            if before is not None:
                os.environ["KUBECONFIG"] = before

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True, config: str = "admin.json") -> str:
        done = subprocess.run(
            ["kubectl", "--kubeconfig", self.folder / config, "--cache-dir", self.folder / "cache", *words],
            input=stdin, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout.strip() if check else (done.stdout + done.stderr).strip()

    def operator(self, *flags: str, config: str = "operator.json") -> subprocess.Popen[bytes]:
        """An operator, as the Deployment starts it, with the rights of its service account."""
        command = [sys.executable, "-m", "edl_hvd.cli.main", "operator", "--every", "200ms", *flags]
        log = open(self.folder / "operator.log", "ab")  # noqa: SIM115
        environment = {**os.environ, "KUBECONFIG": str(self.folder / config)}
        process = subprocess.Popen(command, env=environment, stderr=log)
        log.close()
        return process

    def _launch(self, *command: object) -> None:
        name = Path(str(command[0])).name
        # Garbage collections took an eighth of these programs' processor time; memory is there.
        environment = {"GOGC": "400", **os.environ}
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes.append(subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment))

    def stop(self) -> None:
        if hasattr(self, "api"):
            self.api.close()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # an API server waits for those who watch
                process.kill()
                process.wait(60)
