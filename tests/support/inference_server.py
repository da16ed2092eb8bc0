"""A server of the Open Inference Protocol as its specification has it, in a process of its own; for tests.

    python inference_server.py '{"binary": true}'      prints its port, and answers until it is killed

It shares no code with the package. The models: "sums" (see ``fleet.py``), "quiet" (the same, and describes no inputs),
"two" (two inputs, two outputs), "wide" (other outputs), "broken", and, when they are in use, "nan", "fails" and "odd".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from waiting import soon

CLASSES = 5
_TYPES = {
    "FP64": "<f8", "FP32": "<f4", "FP16": "<f2", "INT64": "<i8", "INT32": "<i4", "INT16": "<i2", "INT8": "i1",
    "UINT8": "u1", "BOOL": "?",
}  # fmt: skip
_INPUTS = {
    "sums": [{"name": "images", "datatype": "FP32", "shape": [-1, 1, 4, 4]}],
    "quiet": [],
    "two": [
        {"name": "a", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "b", "datatype": "INT64", "shape": [-1]},
    ],
    "wide": [], "nan": [], "fails": [], "odd": [], "broken": [],
}  # fmt: skip


@dataclass(frozen=True)
class ServerKind:
    """How a server behaves.

    Attributes:
        binary: Whether it knows the extension "binary tensor data".
        keeps: Whether it keeps a connection for the next request.
        delay_s: Time of an answer.
        together: Number of requests that have to be there at the same time once, before it answers one with an input
            that is not all zeros.
        loads_s: Time after its start until its models are loaded.
        port: Port; 0 takes a free one.
        certificate, key: Files for https; empty for http.
    """

    binary: bool = True
    keeps: bool = True
    delay_s: float = 0.0
    together: int = 1
    loads_s: float = 0.0
    port: int = 0
    certificate: str = ""
    key: str = ""


def sums(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The right answer, as ``fleet.sums`` has it."""
    flat = images.reshape(len(images), -1).astype(np.float64)
    weights = np.arange(flat.shape[1], dtype=np.float64)[:, None] * np.arange(1.0, CLASSES + 1)
    answer: np.ndarray[Any, Any] = (flat @ np.cos(weights)).astype(np.float32)
    return answer


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    kind = ServerKind()
    began_s = 0.0
    asked = 0
    waiting = 0
    has_met = threading.Event()

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v2/health/ready":
            self.reply(200 if self.is_loaded else 503, {})
            return
        name = self.path.removeprefix("/v2/models/")
        if name not in _INPUTS or not self.is_loaded:
            self.reply(404, {"error": f"model {name} is not found"})
            return
        self.reply(200, {"name": name, "versions": ["1"], "platform": "numpy", "inputs": _INPUTS[name], "outputs": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.removeprefix("/v2/models/").removesuffix("/infer")
        type(self).asked += 1
        time.sleep(self.kind.delay_s)
        try:
            given = self.read_inputs(body)
            if any(values.any() for values in given.values()):
                type(self).waiting += 1
                if self.waiting >= self.kind.together:
                    self.has_met.set()
                soon(self.has_met)
            outputs = answer(name, given, type(self).asked)
        except Exception as error:
            self.reply(400, {"error": f"{type(error).__name__}: {error}"})
            return
        is_raw = self.kind.binary and json.loads(body[: self.head_of(body)]).get("parameters", {}).get(
            "binary_data_output"
        )
        self.send(outputs, is_raw)

    @property
    def is_loaded(self) -> bool:
        return time.monotonic() - self.began_s >= self.kind.loads_s

    def head_of(self, body: bytes) -> int:
        length = self.headers["Inference-Header-Content-Length"]
        if length is not None and not self.kind.binary:
            raise ValueError("this server takes JSON alone")
        return len(body) if length is None else int(length)

    def read_inputs(self, body: bytes) -> dict[str, np.ndarray[Any, Any]]:
        offset = self.head_of(body)
        found = {}
        for entry in json.loads(body[:offset])["inputs"]:
            dtype, size = _TYPES[entry["datatype"]], entry.get("parameters", {}).get("binary_data_size")
            if size is None:
                values = np.array(entry["data"], dtype)
            else:
                values = np.frombuffer(body[offset : offset + size], dtype)
                offset += size
            found[entry["name"]] = values.reshape(entry["shape"])
        if offset != len(body):
            raise ValueError("bytes are left over")
        return found

    def send(self, outputs: dict[str, np.ndarray[Any, Any]], is_raw: bool) -> None:
        entries, raw = [], b""
        for name, values in outputs.items():
            datatype = next(key for key, code in _TYPES.items() if np.dtype(code) == values.dtype)
            entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
            if is_raw:
                entry["parameters"] = {"binary_data_size": values.nbytes}
                raw += values.tobytes()
            else:
                entry["data"] = values.tolist()  # nested, as the specification allows
            entries.append(entry)
        self.reply(200, {"model_name": "m", "outputs": entries}, raw, is_raw)

    def reply(self, status: int, document: dict[str, Any], raw: bytes = b"", is_raw: bool = False) -> None:
        head = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(head) + len(raw)))
        if is_raw:
            self.send_header("Inference-Header-Content-Length", str(len(head)))
        if not self.kind.keeps:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(head + raw)


def answer(name: str, given: dict[str, np.ndarray[Any, Any]], number: int) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a model."""
    if name == "two":
        total = given["a"].sum(1)
        return {"plus": total + given["b"].astype(np.float32), "minus": total - given["b"].astype(np.float32)}
    images = next(iter(given.values()))
    result = sums(images)
    is_probe = not images.any()
    if name == "broken":
        raise RuntimeError("no memory")
    if name == "fails" and not is_probe:
        raise RuntimeError("this input is not for me")
    if name == "nan" and not is_probe:
        result[0, 0] = np.nan
    if name == "odd" and not is_probe:
        result = result[:, :3].copy()
    if name == "wide":
        result = np.concatenate([result, result], axis=1)
    return {"scores": result}


def main() -> None:
    """Serve."""
    Handler.kind = ServerKind(**json.loads(sys.argv[1]))
    Handler.protocol_version = "HTTP/1.1"
    Handler.began_s = time.monotonic()
    server = ThreadingHTTPServer(("127.0.0.1", Handler.kind.port), Handler)
    server.daemon_threads = True
    if Handler.kind.certificate:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Handler.kind.certificate, Handler.kind.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()


class InferenceServer:
    """A server that runs."""

    def __init__(self, kind: ServerKind) -> None:
        words = [sys.executable, __file__, json.dumps(asdict(kind))]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def source(self, model: str = "sums", requests: int = 2) -> str:
        """The source that names its model."""
        return f"oip:{self.url(model)}?requests={requests}"

    def url(self, model: str = "sums") -> str:
        return f"http://127.0.0.1:{self.port}/{model}"

    def signal(self, which: int) -> None:
        os.kill(self.process.pid, which)

    def close(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        soon(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def inference_servers(*kinds: ServerKind) -> Iterator[list[InferenceServer]]:
    """Servers of these kinds."""
    servers: list[InferenceServer] = []
    try:
        for kind in kinds:
            servers.append(InferenceServer(kind))
        yield servers
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()
