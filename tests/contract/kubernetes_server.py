"""Small web servers that can be told how to behave: one that lists hosts, and one that speaks Kubernetes.

The answers of the latter have the shape of the API reference: a ``PodList`` in pages, a ``Status`` for a refusal.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

REFUSALS = {"throttled": 429, "not allowed": 403, "broken": 500, "busy": 503}
# The other ways to be wrong: "refuse" hangs up, "hang" never answers.
INSTEAD = {"not json": b'{"hosts": [', "a web page": b"<html><body>Sign in</body></html>\n", "nothing": b""}
# Further: "truncated", "half a text" of unknown length, "elsewhere", a redirect to another host, and "slow", which
# answers when ``behave`` is called again.
Answer = tuple[int, dict[str, str], bytes]


class ToldServer:
    """A server on this machine; ``behave`` says what becomes of the questions.

    Attributes:
        questions: Path and query of each question, with the status of its answer.
        token: What the ``Authorization`` header has to hold; empty: nothing.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self._behaviour = "answer"
        self._closing = threading.Event()
        self._changed = threading.Event()
        self.questions: list[tuple[str, int]] = []
        self.token = ""
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.handle(self)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are of no interest in a test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake is left to the thread of the question: a client that does not speak must not stop the rest.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            scheme = "https"
        self._server.handle_error = lambda *arguments: None  # clients hang up, too
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def behave(self, behaviour: str) -> None:
        """ "answer", "refuse", "hang", or another way to be wrong, see above."""
        self._behaviour = behaviour
        self._changed.set()
        self._changed = threading.Event()

    def answer(self, path: str, headers: Any) -> Answer:
        """The right answer."""
        raise NotImplementedError

    def refusal(self, status: int, reason: str) -> Answer:
        return status, {}, f"{reason}\n".encode()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        changed = self._changed  # before the behaviour: if that changes in between, this one is set
        behaviour = self._behaviour
        if behaviour == "hang":
            self._closing.wait(600)
        if behaviour == "slow":
            changed.wait(600)
        if behaviour in ("hang", "refuse"):
            return
        if self.token and request.headers["Authorization"] != f"Bearer {self.token}":
            status, headers, body = self.refusal(401, "Unauthorized")
        elif behaviour in REFUSALS:
            status, headers, body = self.refusal(REFUSALS[behaviour], behaviour)
        else:
            status, headers, body = self.answer(request.path, request.headers)
        self.questions.append((request.path, status))
        length: int | None = len(body)
        if behaviour == "truncated":
            body = body[: len(body) // 2]
        elif behaviour == "half a text":
            length, body = None, b"node-0:1\nnode-1:1\n"
        elif behaviour == "elsewhere":
            status, headers, body, length = 302, {"Location": "http://example.invalid/hosts"}, b"", 0
        elif behaviour in INSTEAD:
            body, length = INSTEAD[behaviour], len(INSTEAD[behaviour])
        request.send_response(status)
        if length is not None:
            headers = {**headers, "Content-Length": str(length)}
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()


class ListServer(ToldServer):
    """Answers every path with the same text or JSON, and knows its ``ETag``."""

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self.body = b"{}"

    def answer(self, path: str, headers: Any) -> Answer:
        tag = f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'
        if headers["If-None-Match"] == tag:
            return 304, {"ETag": tag}, b""
        return 200, {"ETag": tag}, self.body


class KubernetesServer(ToldServer):
    """The pods of one namespace.

    Attributes:
        pods: As made by ``pod``.
        expiries: So many more continued lists are answered with 410 Gone.
    """

    def __init__(self, namespace: str, certificate: Path) -> None:
        super().__init__(certificate)
        self._namespace = namespace
        self.pods: list[dict[str, Any]] = []
        self.expiries = 0.0

    def refusal(self, status: int, reason: str) -> Answer:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
        return status, {}, json.dumps({**content, "message": f"as told: {reason}"}).encode()

    def answer(self, path: str, headers: Any) -> Answer:
        address = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        if address.path != f"/api/v1/namespaces/{self._namespace}/pods":
            return self.refusal(404, "NotFound")
        start = int(query.get("continue", "0"))
        if start and self._behaviour == "second page fails":
            return self.refusal(500, "InternalError")
        if start and self.expiries > 0:
            self.expiries -= 1
            return self.refusal(410, "Expired")
        wanted = dict(word.split("=") for word in query["labelSelector"].split(","))
        pods = [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]
        end = start + int(query["limit"])
        metadata = {"resourceVersion": "7", **({"continue": str(end)} if end < len(pods) else {})}
        content = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": pods[start:end]}
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def pod(name: str, address: str, gpus: int = 4, ready: bool = True, app: str = "trainer") -> dict[str, Any]:
    """A running pod as the API server lists it."""
    condition = {"type": "Ready", "status": str(ready)}
    if not ready:
        condition["message"] = "containers with unready status: [worker]"
    limits = {"cpu": "8", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "metadata": {"name": name, "namespace": "training", "labels": {"app": app},
                     "creationTimestamp": "2026-01-31T11:59:00Z"},
        "spec": {"nodeName": f"node-of-{name}", "containers": [{"name": "worker", "resources": {"limits": limits}}]},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
                   "startTime": "2026-01-31T12:00:00Z", "conditions": [{"type": "Initialized", "status": "True"},
                                                                       condition]},
    }  # fmt: skip


def deleted(one: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same pod when its deletion is known, with so much of its grace period left."""
    gone = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    metadata = {**one["metadata"], "deletionTimestamp": gone.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "deletionGracePeriodSeconds": 30}  # fmt: skip
    return {**one, "metadata": metadata}


def make_certificate(path: Path, authority: Path, address: str = "127.0.0.1") -> None:
    """A key and a certificate that signs itself, into ``path``; the certificate alone into ``authority``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + pem)
    authority.write_bytes(pem)
