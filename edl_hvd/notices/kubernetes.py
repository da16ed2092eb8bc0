"""Kubernetes: the deletion of this pod, from the API server, with the pod's service account.

Source: Kubernetes API reference, ObjectMeta (``deletionTimestamp`` is when the grace period ends) and "Accessing the
Kubernetes API from a Pod". The account needs the permission to "get" pods in its namespace.
"""

from __future__ import annotations

import json
import os
import socket
import ssl

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import seconds_since_epoch
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.request import refusal, request

ADDRESS = "https://kubernetes.default.svc"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesNotices:
    """Provider of Kubernetes, for one thread at a time.

    Args:
        address: URL of the API server.
        folder: Folder of the service account: ``token``, ``namespace`` and ``ca.crt``.
        pod: Name of the pod; ``None`` for this host's name, which is the pod's unless its specification changes it.
    """

    name = "kubernetes"
    every_s = 5.0
    # Seconds: a sixth of the usual grace period. Every pod of the job asks the API server.

    def __init__(
        self,
        address: str = ADDRESS,
        folder: str = SERVICE_ACCOUNT,
        pod: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._address = address.rstrip("/")
        self._folder = folder
        self._pod = socket.gethostname() if pod is None else pod
        self._clock = clock

    def ask(self) -> Notice | None:
        path = f"/api/v1/namespaces/{self._read('namespace')}/pods/{self._pod}"
        # Read each time: kubelet renews it.
        headers = {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}
        answer = request(self._address, path, headers, self._clock, context=self._trust())
        if answer.status != 200:
            raise refusal(self._address, path, answer)
        return read_pod(answer.text, answer.now_s(self._clock))

    def _read(self, name: str) -> str:
        path = os.path.join(self._folder, name)
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PlatformError(f"cannot read {path} of the pod's service account: {error}") from error

    def _trust(self) -> ssl.SSLContext | None:
        if not self._address.startswith("https:"):
            return None
        path = os.path.join(self._folder, "ca.crt")
        try:
            return ssl.create_default_context(cafile=path)
        except (OSError, ssl.SSLError) as error:
            raise PlatformError(f"cannot use {path} of the pod's service account: {error}") from error


def read_pod(text: str, now_s: float) -> Notice | None:
    """Read the notice in a pod that is being deleted.

    Raises:
        PlatformError: The pod is not understood.
    """
    try:
        metadata = json.loads(text)["metadata"]
        time = metadata.get("deletionTimestamp")
        if time is None:
            return None
        period_s = float(metadata["deletionGracePeriodSeconds"])
        left_s = min(max(seconds_since_epoch(time) - now_s, 0.0), period_s)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlatformError(f"the pod is not understood: {text[:200]!r}") from error
    return Notice("pod deletion", left_s, f"Kubernetes deletes this pod at {time}", str(time))
