"""Every discovery script with a source behind it that can be told how to behave."""

from __future__ import annotations

import fcntl
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from servers import AwsServer

from edl_hvd.discovery.polling.cached import Keep

SCRIPTS = Path(__file__).parents[2] / "discovery_scripts"


class Scene(ABC):
    """One script, its arguments, and its source. Hosts are ``name:slots`` words."""

    script: str
    refresh_s: float

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "EDL_HVD_PYTHON": sys.executable,
            "EDL_HVD_DISCOVERY_CACHE": str(self.cache),
            "EDL_HVD_DISCOVERY_STALE": "300",
        }

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """Arguments of a normal call."""

    @property
    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The same as environment variables."""

    @abstractmethod
    def show(self, count: int) -> list[str]:
        """The source has ``count`` hosts from now on; returns the lines expected of a poll, sorted."""

    @abstractmethod
    def hang(self) -> None:
        """The source takes questions and never answers."""

    @abstractmethod
    def recover(self) -> None:
        """End whatever ``hang`` or a doubt began."""

    @property
    @abstractmethod
    def doubts(self) -> dict[str, Callable[[], None]]:
        """Ways in which the source can be wrong, each with a name."""

    def path(self) -> str:
        return str(SCRIPTS / self.script)

    def poll(self, words: list[str] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """One poll, as Horovod makes it: a real process. The limit only ends a test that would hang."""
        command = [self.path(), *(self.words if words is None else words)]
        return subprocess.run(
            command, env={**self.environment, **variables}, cwd=self.folder, capture_output=True, text=True, timeout=120
        )

    def start_poll(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.path(), *self.words],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def poll_until(
        self, accept: Callable[[subprocess.CompletedProcess[str]], bool]
    ) -> subprocess.CompletedProcess[str]:
        """Poll again and again, as Horovod does; the limit only ends a test that would hang."""
        for _ in range(1200):
            result = self.poll()
            if accept(result):
                return result
            time.sleep(0.05)
        raise AssertionError(f"never accepted; the last poll was {result}")

    def let_pass(self, duration_s: float) -> None:
        """Make what is kept older, as if polls had gone on; the process that asks is killed first."""
        self.kill_askers()
        for path in self.cache.glob("*/*.answer"):
            keep = Keep(str(path.with_suffix("")))
            record = keep.read()
            since_question_s = min(duration_s, self.refresh_s)
            older = replace(
                record,
                began_s=record.began_s - duration_s,
                answered_s=record.answered_s - duration_s,
                asked_s=record.asked_s - since_question_s,
                failed_s=record.failed_s - since_question_s,
            )
            keep.write(older, self.refresh_s)

    def forget(self) -> None:
        """As if there had never been a poll."""
        self.kill_askers()
        for path in self.cache.glob("*/*"):
            path.unlink()

    def kill_askers(self) -> int:
        """SIGKILL every process that asks for this scene; returns how many there were."""
        killed = 0
        for path in self.cache.glob("*/*.lock"):
            with path.open("r+") as lock:
                while not _try_lock(lock.fileno()):
                    lock.seek(0)
                    if pid := lock.read().strip():
                        os.kill(int(pid), signal.SIGKILL)
                        killed += 1
                        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when it is really gone
                        break
        return killed

    def close(self) -> None:
        self.kill_askers()


def in_order(hosts: Iterable[tuple[str, int]]) -> list[str]:
    """The lines of an answer: sorted by host."""
    return [f"{host}:{slots}" for host, slots in sorted(hosts)]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _FileScene(Scene):
    refresh_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / "some hosts.txt"

    @property
    def words(self) -> list[str]:
        return [self.file.name]

    def write(self, text: str) -> None:
        self.recover()
        part = self.folder / "part"
        part.write_text(text)
        part.replace(self.file)

    def hang(self) -> None:
        os.mkfifo(self.folder / "pipe")
        (self.folder / "pipe").replace(self.file)

    def recover(self) -> None:
        if self.file.is_dir():
            self.file.rmdir()

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            "missing": lambda: self.file.unlink(missing_ok=True),
            "emptied": lambda: self.write(""),
            "malformed": lambda: self.write("one two three four\n"),
            "not text": lambda: _replace_bytes(self.file, b"\xff\xfe\x00"),
            "a folder": lambda: _replace_by_folder(self.file),
        }


def _replace_bytes(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


class StaticFileScene(_FileScene):
    script = "from_file"

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_FILE": self.file.name}

    def show(self, count: int) -> list[str]:
        self.write("# hosts\n" + "".join(f"node-{number} slots={number + 1}\n" for number in reversed(range(count))))
        return in_order((f"node-{number}", number + 1) for number in range(count))

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            **super().doubts,
            "half written": lambda: self.write("node-0 slots=1\nnode-1 slo"),
            "a host twice": lambda: self.write("node-0\nnode-0:2\n"),
            "three fields": lambda: self.write("a:b:c\n"),
        }


class ScheduleScene(_FileScene):
    script = "from_schedule"

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_PLAN": self.file.name}

    def show(self, count: int) -> list[str]:
        coming = "".join(f"0 add node-{number}:{number + 1}\n" for number in reversed(range(count)))
        self.write(f"0 add gone\n{coming}0 remove gone\n1h add late\n")
        return in_order((f"node-{number}", number + 1) for number in range(count))

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            **super().doubts,
            "half written": lambda: self.write("0 add node-0:1\n10 add nod"),
            "out of order": lambda: self.write("10 add node-0\n5 add node-1\n"),
            "removes a stranger": lambda: self.write("0 add node-0\n5 remove node-1\n"),
        }


class Ec2Scene(Scene):
    """The script against moto's server, behind a gate that can fail in the ways that EC2 can."""

    script = "from_ec2"
    refresh_s = 10.0

    def __init__(self, folder: Path, aws: AwsServer) -> None:
        super().__init__(folder)
        self.gate = Gate(aws.url)
        self.ec2 = aws.client("ec2")
        self.job = uuid.uuid4().hex
        self.environment.update({**aws.environment, "AWS_ENDPOINT_URL": self.gate.url, "HOME": str(folder)})
        self.environment["EDL_HVD_DISCOVERY_FIRST"] = "60"  # a busy machine loads boto3 slowly
        self._image = self.ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        self._instances: list[str] = []

    @property
    def words(self) -> list[str]:
        return ["--tag", f"job={self.job}", "--slots", "4", "--page-size", "5"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_TAG": f"job={self.job}", "EDL_HVD_DISCOVERY_SLOTS": "4"}

    def run_instances(self, count: int, instance_type: str = "g4dn.xlarge", **tags: str) -> list[dict[str, str]]:
        """Start instances with this scene's tag and further ones, each by itself: moto's pages count requests."""
        pairs = [{"Key": key, "Value": value} for key, value in {"job": self.job, **tags}.items()]
        started = [
            self.ec2.run_instances(
                ImageId=self._image,
                MinCount=1,
                MaxCount=1,
                InstanceType=instance_type,
                TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}],
            )["Instances"][0]
            for _ in range(count)
        ]
        self._instances += [instance["InstanceId"] for instance in started]
        return started

    def show(self, count: int) -> list[str]:
        if self._instances:
            self.ec2.terminate_instances(InstanceIds=self._instances)
            self._instances = []
        instances = self.run_instances(count) if count else []
        return in_order((instance["PrivateIpAddress"], 4) for instance in instances)

    def hang(self) -> None:
        self.gate.behave("hang")

    def recover(self) -> None:
        self.gate.behave("forward")

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        def behaviour(name: str) -> Callable[[], None]:
            return lambda: self.gate.behave(name)

        return {name: behaviour(name) for name in ("refuse", *GARBLED, *REFUSALS)}

    def close(self) -> None:
        super().close()
        self.gate.close()
        if self._instances:
            self.ec2.terminate_instances(InstanceIds=self._instances)


GARBLED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda body: body[: len(body) // 2],
    "not xml": lambda body: b"upstream connect error",
    "a web page": lambda body: b"<html><body>Sign in to the hotel's network</body></html>",
    "nothing": lambda body: b"",
}
REFUSALS = {
    "throttled": (503, "RequestLimitExceeded"),
    "expired": (400, "RequestExpired"),
    "wrong credentials": (401, "AuthFailure"),
    "not allowed": (403, "UnauthorizedOperation"),
    "second page fails": (500, "InternalError"),
}


class Gate:
    """A proxy in front of a server; ``behave`` says what becomes of the requests."""

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://")
        self._behaviour = "forward"
        self._closing = threading.Event()
        self.questions: list[str] = []
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                gate.handle(self)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are of no interest in a test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def behave(self, behaviour: str) -> None:
        """ "forward", "refuse" (hang up), "hang", or a name of GARBLED or REFUSALS."""
        self._behaviour = behaviour

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.questions.append(body.decode())
        behaviour = self._behaviour
        request.close_connection = behaviour != "forward"
        if behaviour == "hang":
            self._closing.wait()
        if behaviour in ("hang", "refuse"):
            return
        if behaviour in REFUSALS and (behaviour != "second page fails" or b"NextToken" in body):
            status, code = REFUSALS[behaviour]
            answer = (
                f"<Response><Errors><Error><Code>{code}</Code><Message>as told</Message></Error></Errors></Response>"
            )
            self._reply(request, status, answer.encode())
            return
        status, content = self._forward(request, body)
        self._reply(request, status, GARBLED.get(behaviour, bytes)(content))

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._target)
        try:
            connection.request("POST", request.path, body, dict(request.headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _reply(self, request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Type", "text/xml")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
