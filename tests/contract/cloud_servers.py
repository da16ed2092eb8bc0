"""Local servers of Google's and Azure's storage: the first an adapter in front of moto, the second Microsoft's Azurite.

Google's XML interface is that of S3 with other names for conditions and copies, so moto's S3 answers it once they are
translated. obstore speaks that interface; the emulators of Google's JSON interface do not know its listings.
Azurite is a program for Node.js: ``npm install azurite`` in a folder that ``AZURITE`` names, or its ``azurite-blob`` on
the path. Where it is missing the tests are skipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import io
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from servers import Application, _one_at_a_time, _QuietHandler
from werkzeug.serving import make_server

_SIGNED = "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
_ACCOUNT = "devstoreaccount1"
# The account of every Azurite, and its key, which is no secret.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class GoogleStorageServer:
    """Google's XML interface over moto's S3.

    Attributes:
        tokens: Bearer tokens that requests have brought.
        refused_token: Token that is answered with 401.
        before: Called with each request's environment before it is answered; what it returns is the answer, if any.
    """

    def __init__(self) -> None:
        self._s3 = DomainDispatcherApplication(create_backend_app)
        self.tokens: set[str] = set()
        self.refused_token = ""
        self.before: Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes] | None] = lambda *_: None
        application = _one_at_a_time(self._serve)
        self._server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What points obstore here."""
        return {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": "testing"}

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        client = boto3.session.Session().client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        client.create_bucket(Bucket=name)
        client.close()
        return name

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = self.before(environ, start_response)
        if answer is not None:
            return answer
        token = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        self.tokens.add(token)
        if token == self.refused_token:
            start_response("401 Unauthorized", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AuthenticationRequired</Code></Error>"]
        environ["HTTP_AUTHORIZATION"] = _SIGNED
        for name in ("RAW_URI", "REQUEST_URI"):
            environ[name] = environ[name].replace("%2D", "-")  # moto takes the bucket as it is written there
        creates = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0"
        if creates and self._exists(environ):
            start_response("412 Precondition Failed", [("Content-Type", "application/xml")])
            return [b"<Error><Code>PreconditionFailed</Code></Error>"]
        if environ["REQUEST_METHOD"] == "DELETE" and not environ["QUERY_STRING"] and not self._exists(environ):
            start_response("404 Not Found", [("Content-Type", "application/xml")])
            return [b"<Error><Code>NoSuchKey</Code></Error>"]
        for name in [name for name in environ if name.startswith("HTTP_X_GOOG_")]:
            environ[name.replace("_GOOG_", "_AMZ_")] = environ.pop(name)

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            renamed = [(name.lower().replace("x-amz-", "x-goog-"), value) for name, value in headers]
            return start_response(status, [*renamed, ("x-goog-generation", "1")], *rest)

        return list(self._s3(environ, start))

    def _exists(self, environ: dict[str, Any]) -> bool:
        """Whether there is an object at the path of a request."""
        path = environ["RAW_URI"].partition("?")[0]
        found: list[str] = []
        asked = environ | {
            "REQUEST_METHOD": "HEAD", "CONTENT_LENGTH": "0", "QUERY_STRING": "", "RAW_URI": path, "REQUEST_URI": path,
            "wsgi.input": io.BytesIO(),
        }  # fmt: skip
        list(self._s3(asked, lambda status, *_: found.append(status)))
        return found[0].startswith("200")


def azurite_command() -> list[str] | None:
    """How Azurite's blob service is started here, or ``None``."""
    folder = os.environ.get("AZURITE", str(Path(__file__).parents[2] / ".venv" / "azurite"))
    program = Path(folder) / "node_modules/azurite/dist/src/blob/main.js"
    node = shutil.which("node")
    if node and program.exists():
        return [node, str(program)]
    found = shutil.which("azurite-blob")
    return [found] if found else None


class AzureStorageServer:
    """Microsoft's Azurite, with its data in memory."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--silent",
             "--disableTelemetry"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "successfully listens on" in line:
                self.url = line.split()[-1].strip()
                break
        else:
            raise AssertionError(f"Azurite did not start: {''.join(said)}")
        self._reader = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._reader.start()

    @property
    def environment(self) -> dict[str, str]:
        """What points obstore here."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{_ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        }

    def new_container(self) -> str:
        name = f"container-{uuid.uuid4().hex[:12]}"
        address = urlsplit(self.url)
        date, version = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2023-11-03"
        signed = (
            "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\n"
            "restype:container"
        )
        signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)).decode()
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        headers = {
            "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
            "Authorization": f"SharedKey {_ACCOUNT}:{signature}",
        }  # fmt: skip
        connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        if answer.status != 201:
            raise AssertionError(f"the container could not be made: {answer.status} {answer.read()!r}")
        connection.close()
        return name

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._reader.join(60)
        self._process.stdout.close()


def azure_server() -> AzureStorageServer:
    """A running server; without Azurite the test is skipped."""
    command = azurite_command()
    if command is None:
        pytest.skip("Azurite is not installed; npm install --prefix .venv/azurite azurite")
    return AzureStorageServer(command)


__all__ = ["Application", "AzureStorageServer", "GoogleStorageServer", "azure_server", "azurite_command"]
