"""Servers that speak a cloud's protocol, on this machine and in this process."""

from __future__ import annotations

import io
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cached_property, wraps
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import boto3
from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import S3Backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class AwsServer:
    """moto's server: S3, EC2 and the rest of AWS in one endpoint. What it holds outlives ``stop``.

    moto checks ``If-None-Match`` and stores the object in two steps, and two requests can pass the check at
    once; S3 itself admits exactly one. So requests are answered one at a time here, and one whose
    sender died before its end is refused, as S3 does too. An unfinished upload began when it began, where moto says
    2010 of each, so that every writer would give up those of all others; one that is gone is answered with 404, where
    moto fails.

    Attributes:
        began: Moment at which each upload in parts began, by its id.
    """

    def __init__(self) -> None:
        self.began: dict[str, datetime] = {}
        self._application = self._with_moments(_one_at_a_time(DomainDispatcherApplication(create_backend_app)))
        self._port = 0
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen on a free port; after ``stop`` again on the same one."""
        self._server = make_server(
            "127.0.0.1", self._port, self._application, threaded=True, request_handler=_QuietHandler
        )
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(60)
            self._server.server_close()
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What points boto3 here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """A boto3 client of this server, whatever the environment says."""
        return boto3.session.Session().client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def new_bucket(self) -> str:
        """The name of a fresh, empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._s3.create_bucket(Bucket=name)
        return name

    @contextmanager
    def asking_for_credentials(self) -> Iterator[None]:
        """Nobody is known meanwhile. Otherwise everybody may do everything."""
        self._ask_after("0")
        try:
            yield
        finally:
            self._ask_after("inf")

    def _with_moments(self, application: Application) -> Application:
        """Say of each unfinished upload when it began."""

        def moment_of(found: re.Match[bytes]) -> bytes:
            began = self.began[re.search(rb"<UploadId>(.+?)</UploadId>", found[0])[1].decode()]
            text = began.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()  # as long as moto's
            return re.sub(rb"(?<=<Initiated>).+?(?=</Initiated>)", text, found[0])

        def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            answer = b"".join(application(environ, start_response))
            if re.match(r"uploads\b", environ.get("QUERY_STRING", "")) or "&uploads" in environ.get("QUERY_STRING", ""):
                if environ["REQUEST_METHOD"] == "POST":
                    for upload in re.findall(rb"<UploadId>(.+?)</UploadId>", answer):
                        self.began[upload.decode()] = datetime.now(timezone.utc)
                answer = re.sub(rb"<Upload>.*?</Upload>", moment_of, answer, flags=re.DOTALL)
            return [answer]

        return serve

    def _ask_after(self, requests: str) -> None:
        kind = {"Content-Type": "text/plain"}
        with urlopen(Request(f"{self.url}/moto-api/reset-auth", requests.encode(), kind, method="POST")):
            pass

    @cached_property
    def _s3(self) -> Any:
        return self.client("s3")

    def __enter__(self) -> AwsServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _QuietHandler(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Requests are of no interest in a test's output."""


def _one_at_a_time(application: Application) -> Application:
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        try:
            body = environ["wsgi.input"].read(length)
        except OSError:
            body = b""
        if len(body) != length:
            start_response("400 Bad Request", [])
            return [b""]
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return list(application(environ, start_response))

    return serve


def _refuse_when_gone(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: S3Backend, bucket_name: str, multipart_id: str, *arguments: Any, **named: Any) -> Any:
        if multipart_id not in self.get_bucket(bucket_name).multiparts:
            raise NoSuchUpload(upload_id=multipart_id)
        return method(self, bucket_name, multipart_id, *arguments, **named)

    return checked


for _name in ("upload_part", "complete_multipart_upload"):
    setattr(S3Backend, _name, _refuse_when_gone(getattr(S3Backend, _name)))
