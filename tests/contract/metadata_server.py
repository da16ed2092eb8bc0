"""HTTP servers on this machine that answer as a cloud's metadata server does, or not at all when told so.

The answers have the form that the clouds' documentation shows: EC2 User Guide ("Spot Instance interruption notices",
"Use IMDSv2"), Compute Engine ("VM metadata", "Preemptible VM instances"), Azure ("Scheduled Events for Linux VMs"),
Kubernetes API reference (Pod).
"""

from __future__ import annotations

import json
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

SLOW_S = 1.2
# Longer than a poll waits for an answer when it has an older one.


@dataclass(frozen=True)
class Reply:
    """What a server answers; ``cut_bytes`` of the end of the body are announced and not sent."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_bytes: int = 0


def in_json(answer: object, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(answer).encode(), {"Content-Type": "application/json", **headers})


class Server(ABC):
    """A server on a free port; ``behave`` says what becomes of the requests.

    Attributes:
        url: Its address.
        questions: Every request so far, as "GET /path?query".
        wall_s: What its clock shows; ``None``: the true time.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        """With a file that holds a certificate and its key, it speaks TLS."""
        self.questions: list[str] = []
        self.wall_s: float | None = None
        self.behaviour = "answer"
        self._closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._handle(self)

            do_POST = do_PUT = do_GET

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(server.wall_s, usegmt=True)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are of no interest in a test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http{'s' if certificate else ''}://{self.host}"

    def behave(self, behaviour: str) -> None:
        """ "answer", "refuse" (hang up), "hang", "slow" (once), "cut off" (half of each body), or more."""
        self.behaviour = behaviour

    @abstractmethod
    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        """To one request, while behaving."""

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.questions.append(f"{request.command} {request.path}")
        request.close_connection = True
        if self.behaviour == "hang":
            self._closing.wait(600)
        if self.behaviour == "slow":
            self.behaviour = "answer"
            self._closing.wait(SLOW_S)
        if self.behaviour in ("hang", "refuse"):
            return
        headers = {name.lower(): value for name, value in request.headers.items()}
        reply = self.answer(request.command, request.path, headers)
        cut_bytes = (len(reply.body) + 1) // 2 if self.behaviour == "cut off" else reply.cut_bytes
        request.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
            request.send_header(name, value)
        request.end_headers()
        with suppress(ConnectionError):  # who asked may have been killed
            request.wfile.write(reply.body[: len(reply.body) - cut_bytes])

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ec2Metadata(Server):
    """IMDSv2. A token is good until ``forget_tokens``.

    Attributes:
        texts: What there is, by path after "/latest/meta-data/".
        tokens: How many were given out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.tokens = 0
        self._good: set[str] = set()

    def forget_tokens(self) -> None:
        self._good.clear()

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if (method, path) == ("PUT", "/latest/api/token"):
            if not 1 <= int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
                return Reply(400)
            self.tokens += 1
            self._good.add(f"token-{self.tokens}")
            return Reply(body=f"token-{self.tokens}".encode())
        if headers.get("x-aws-ec2-metadata-token") not in self._good:
            return Reply(401, b"Unauthorized")
        text = self.texts.get(path.removeprefix("/latest/meta-data/"))
        return Reply(404, b"Not Found") if text is None else Reply(body=text.encode())


class GoogleMetadata(Server):
    """Google's metadata server.

    Attributes:
        texts: What there is, by path after "/computeMetadata/v1/".
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts = {"instance/preempted": "FALSE", "instance/maintenance-event": "NONE"}

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if headers.get("metadata-flavor") != "Google":
            return Reply(403, b"Missing Metadata-Flavor:Google header.")
        text = self.texts.get(path.removeprefix("/computeMetadata/v1/"))
        told = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        return Reply(404, b"Not Found", told) if text is None else Reply(body=text.encode(), headers=told)


class AzureMetadata(Server):
    """Azure's scheduled events, and the name of the machine.

    Attributes:
        events: As ``event`` makes them.
    """

    NAME = "training-vmss_3"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if headers.get("metadata") != "true":
            return Reply(400, b'{ "error": "Bad request. Required metadata header not specified" }')
        if path.startswith("/metadata/instance/compute/name?api-version="):
            return Reply(body=self.NAME.encode())
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return in_json({"DocumentIncarnation": len(self.events), "Events": self.events})
        return Reply(404)

    def event(self, kind: str, not_before: str, *machines: str, status: str = "Scheduled") -> dict[str, object]:
        return {
            "EventId": f"{kind}-{not_before}",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(machines or (self.NAME,)),
            "EventStatus": status,
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }


class KubernetesPod(Server):
    """The API server, as far as one pod is concerned.

    Attributes:
        token: The one that may read it.
        metadata: Of the pod.
    """

    PATH = "/api/v1/namespaces/training/pods/worker-3"

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self.token = "first"
        self.metadata: dict[str, object] = {"name": "worker-3", "namespace": "training", "uid": "7f1c"}

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if headers.get("authorization") != f"Bearer {self.token}":
            return in_json({"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401}, 401)
        if path != self.PATH:
            return in_json({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404)
        return in_json({"kind": "Pod", "apiVersion": "v1", "metadata": self.metadata, "spec": {}, "status": {}})
