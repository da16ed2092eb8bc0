"""Kueue itself, as a process beside the control plane, for the namespace of a test."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from cluster import Cluster, free_ports, wait_for

_NAMESPACE, _SECRET = "kueue-system", "kueue-webhook-server-cert"
_SERVICE = "kueue-webhook-service"
# Resources whose webhooks Kueue serves here; it is told to manage pods and no other workload.
_KINDS = {"pods", "clusterqueues", "cohorts", "resourceflavors", "workloads"}


def without_kueue() -> str:
    """Why Kueue cannot be started here; empty if it can."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
    lacking = [name for name in ("kueue", "kueue.yaml") if not (folder / name).is_file()]
    return f"no {' and '.join(lacking)}; docs/testing.md says how to make them" if lacking else ""


class Kueue:
    """The controller of Kueue, which manages the pods of one namespace.

    Args:
        cluster: The control plane, of a version that Kueue supports.
        namespace: Namespace of the test.
        folder: Folder for its files.
    """

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.made: list[dict[str, Any]] = []
        self.webhook, self.health = free_ports(2)
        self._make_certificates()
        self._apply(self._manifests())
        self.process = self._start()
        url = f"https://127.0.0.1:{self.webhook}/healthz"
        wait_for("Kueue's webhooks", lambda: self._answers(url))

    def queue(self, name: str, cpu: int | dict[str, int], cohort: str = "") -> None:
        """Make, or change, a queue of the namespace with a quota of processors.

        Args:
            name: Its name.
            cpu: The quota; or that of each flavor, whose nodes have its name as their label ``flavor``.
            cohort: Cohort from which it borrows, and takes back what is its own; empty: none.
        """
        quotas = cpu if isinstance(cpu, dict) else {"any": cpu}
        labels = {one: {"flavor": one} if isinstance(cpu, dict) else {} for one in quotas}
        flavors = [
            {"kind": "ResourceFlavor", "metadata": {"name": one}, "spec": {"nodeLabels": labels[one]}} for one in quotas
        ]
        given = [
            {"name": one, "resources": [{"name": "cpu", "nominalQuota": str(quota)}]} for one, quota in quotas.items()
        ]
        preemption = {"withinClusterQueue": "LowerPriority", **({"reclaimWithinCohort": "Any"} if cohort else {})}
        cluster_queue = {
            "kind": "ClusterQueue", "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {}, "preemption": preemption, **({"cohortName": cohort} if cohort else {}),
                "resourceGroups": [{"coveredResources": ["cpu"], "flavors": given}],
            },
        }  # fmt: skip
        meta = {"name": name, "namespace": self.namespace}
        local_queue = {"kind": "LocalQueue", "metadata": meta, "spec": {"clusterQueue": name}}
        made = [*flavors, cluster_queue, local_queue]
        self._apply([{"apiVersion": "kueue.x-k8s.io/v1beta2", **one} for one in made])

    def stop(self) -> None:
        """End it, once no pod has its finalizer, and remove what would hold up pods without it."""
        self.cluster.kubectl("-n", self.namespace, "delete", "tj,pod", "--all", "--timeout=180s")
        kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
        self.cluster.kubectl("delete", kinds, "-l", "app.kubernetes.io/name=kueue")
        self.process.terminate()
        self.process.wait(60)

    def _apply(self, objects: list[dict[str, Any]]) -> None:
        made = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=made)

    def _make_certificates(self) -> None:
        names = f"subjectAltName=IP:127.0.0.1,DNS:{_SERVICE}.{_NAMESPACE}.svc\nextendedKeyUsage=serverAuth\n"
        (self.folder / "names").write_text(names)
        for command in (
            "genrsa -traditional -out ca.key 2048",
            "req -x509 -key ca.key -subj /CN=kueue-ca -addext subjectAltName=DNS:kueue-ca -days 1000 -out ca.crt",
            "genrsa -traditional -out tls.key 2048",
            "req -new -key tls.key -subj /CN=kueue -out tls.csr",
            "x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 900 -extfile names -out tls.crt",
        ):
            subprocess.run(["openssl", *command.split()], cwd=self.folder, check=True, capture_output=True)

    def _manifests(self) -> list[dict[str, Any]]:
        """What its release applies, without its pod: the API server calls its webhooks by their address."""
        files = {name: (self.folder / name).read_text() for name in ("ca.crt", "ca.key", "tls.crt", "tls.key")}
        kept: list[dict[str, Any]] = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": _SECRET, "namespace": _NAMESPACE},
             "stringData": files},
        ]  # fmt: skip
        text = Path(os.environ["KUBEBUILDER_ASSETS"], "kueue.yaml").read_text(encoding="utf-8")
        for one in yaml.load_all(text, yaml.CSafeLoader):
            if one["kind"] == "CustomResourceDefinition":
                if conversion := one["spec"].get("conversion"):
                    self._by_address(conversion["webhook"]["clientConfig"])
                kept.append(one)
            elif one["kind"].endswith("WebhookConfiguration"):
                one["webhooks"] = [hook for hook in one["webhooks"] if _KINDS & set(hook["rules"][0]["resources"])]
                one["metadata"]["labels"] = {"app.kubernetes.io/name": "kueue"}
                for hook in one["webhooks"]:
                    self._by_address(hook["clientConfig"])
                    if hook["rules"][0]["resources"] == ["pods"]:
                        hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}
                kept.append(one)
        return kept

    def _by_address(self, client: dict[str, Any]) -> None:
        path = client.pop("service").get("path", "/convert")
        client["url"] = f"https://127.0.0.1:{self.webhook}{path}"
        client["caBundle"] = base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "namespace": _NAMESPACE,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self.health}"}, "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self.webhook, "certDir": str(self.folder)},
            "leaderElection": {"leaderElect": False}, "integrations": {"frameworks": ["pod"]},
            "internalCertManagement": {
                "enable": True, "webhookServiceName": _SERVICE, "webhookSecretName": _SECRET,
            },
        }  # fmt: skip
        (self.folder / "config.json").write_text(json.dumps(settings))
        command: list[str | Path] = [
            Path(os.environ["KUBEBUILDER_ASSETS"], "kueue"), "--config", self.folder / "config.json",
            "--kubeconfig", self.cluster.folder / "admin.json", "--feature-gates", "VisibilityOnDemand=false",
        ]  # fmt: skip
        with open(self.folder / "kueue.log", "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _answers(self, url: str) -> bool:
        assert self.process.poll() is None, (self.folder / "kueue.log").read_text()[-2000:]
        trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        try:
            urllib.request.urlopen(url, timeout=5, context=trust).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
