"""The discovery scripts that ask a cloud, against moto's server and a small one that speaks Google's REST."""

from __future__ import annotations

import functools
import http.client
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

from discovery_scenes import Scene, in_order
from google_server import DOUBTS, GoogleServer
from metadata_server import SLOW_S
from servers import AwsServer

from edl_hvd.discovery.registry import make_source
from edl_hvd.discovery.source import Source


def source_of(kind: str, *words: str) -> Source:
    return make_source(kind, words, []).source


def ask(source: Source) -> dict[str, int]:
    return {entry.host: entry.slots for entry in source.answer().hosts}


def granted(source: Source) -> dict[str, bool | None]:
    return {permission.name: permission.granted for permission in source.permissions()}


@functools.cache
def client(aws: AwsServer, service: str) -> Any:
    """One for all scenes: botocore takes a quarter of a second to make one of EC2."""
    return aws.client(service)


@functools.cache
def _image(aws: AwsServer) -> str:
    return str(client(aws, "ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"])


class CloudScene(Scene):
    """One whose source is in trouble when its server is."""

    refresh_s = 10.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment["EDL_HVD_DISCOVERY_FIRST"] = "60"  # a busy machine is slow, most of all to load botocore

    def behave(self, behaviour: str) -> None:
        """Of the server; see ``Gate.behave`` and ``Server.behave``."""
        raise NotImplementedError

    def hang(self) -> None:
        self.behave("hang")

    def doubts_named(self, names: tuple[str, ...]) -> dict[str, Callable[[], None]]:
        return {name: functools.partial(self.behave, name) for name in names}


class AwsScene(CloudScene):
    """A script against moto's server, behind a gate that can fail in the ways that AWS can."""

    def __init__(self, folder: Path, aws: AwsServer) -> None:
        super().__init__(folder)
        self.gate = Gate(aws.url)
        self.ec2 = client(aws, "ec2")
        self.job = uuid.uuid4().hex
        self.environment.update({**aws.environment, "AWS_ENDPOINT_URL": self.gate.url, "HOME": str(folder)})
        self.image = _image(aws)
        self.instances: list[str] = []

    def run_instances(self, count: int, instance_type: str = "g4dn.xlarge", **tags: str) -> list[dict[str, str]]:
        """Start instances with this scene's tag and further ones, each by itself: moto's pages count requests."""
        pairs = [{"Key": key, "Value": value} for key, value in {"job": self.job, **tags}.items()]
        started = [
            self.ec2.run_instances(
                ImageId=self.image,
                MinCount=1,
                MaxCount=1,
                InstanceType=instance_type,
                TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}],
            )["Instances"][0]
            for _ in range(count)
        ]
        self.instances += [instance["InstanceId"] for instance in started]
        return started

    def request_spot_instance(self) -> tuple[str, dict[str, str]]:
        """A spot instance with this scene's tag, and the request that it belongs to."""
        wanted = {"ImageId": self.image, "InstanceType": "g4dn.xlarge"}
        request = self.ec2.request_spot_instances(SpotPrice="0.5", LaunchSpecification=wanted)["SpotInstanceRequests"][
            0
        ]
        name = request["InstanceId"]
        self.instances.append(name)
        self.ec2.create_tags(Resources=[name], Tags=[{"Key": "job", "Value": self.job}])
        found = self.ec2.describe_instances(InstanceIds=[name])["Reservations"][0]["Instances"][0]
        return request["SpotInstanceRequestId"], found

    def end_instances(self) -> None:
        if self.instances:
            self.ec2.terminate_instances(InstanceIds=self.instances)
            self.instances = []

    def behave(self, behaviour: str) -> None:
        self.gate.behave(behaviour)

    def recover(self) -> None:
        self.gate.behave("forward")

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return self.doubts_named(("refuse", *GARBLED, *REFUSALS))

    def close(self) -> None:
        super().close()
        self.gate.close()
        self.end_instances()


class Ec2Scene(AwsScene):
    script = "from_ec2"

    @property
    def words(self) -> list[str]:
        return ["--tag", f"job={self.job}", "--slots", "4", "--page-size", "5"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_TAG": f"job={self.job}", "EDL_HVD_DISCOVERY_SLOTS": "4"}

    def show(self, count: int) -> list[str]:
        self.end_instances()
        return in_order((instance["PrivateIpAddress"], 4) for instance in self.run_instances(count))


class AutoScalingScene(AwsScene):
    script = "from_auto_scaling"

    def __init__(self, folder: Path, aws: AwsServer) -> None:
        super().__init__(folder, aws)
        self.groups = client(aws, "autoscaling")
        self.groups.create_launch_configuration(
            LaunchConfigurationName=self.job, ImageId=self.image, InstanceType="g4dn.xlarge"
        )
        self.groups.create_auto_scaling_group(
            AutoScalingGroupName=self.job,
            LaunchConfigurationName=self.job,
            MinSize=0,
            MaxSize=100,
            AvailabilityZones=["us-east-1a"],
        )

    @property
    def words(self) -> list[str]:
        return [self.job, "--slots", "4", "--page-size", "5"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_GROUP": self.job, "EDL_HVD_DISCOVERY_SLOTS": "4"}

    def show(self, count: int) -> list[str]:
        self.end_instances()
        return in_order((instance["PrivateIpAddress"], 4) for instance in self.attach_instances(count))

    def attach_instances(self, count: int) -> list[dict[str, str]]:
        """Start instances and put them into the group."""
        instances = self.run_instances(count)
        if instances:
            names = [instance["InstanceId"] for instance in instances]
            self.groups.attach_instances(AutoScalingGroupName=self.job, InstanceIds=names)
        return instances

    def end_instances(self) -> None:
        if self.instances:
            self.groups.detach_instances(
                AutoScalingGroupName=self.job, InstanceIds=self.instances, ShouldDecrementDesiredCapacity=True
            )
        super().end_instances()


class GoogleScene(CloudScene):
    """The script against a server whose clock is a day ahead, which changes nothing."""

    script = "from_google"
    GROUP = "resnet50"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.google = GoogleServer()
        self.google.wall_s = 1_900_000_000.0
        self.environment["GCE_METADATA_HOST"] = self.google.host
        self.environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"] = f"{self.google.url}/compute/v1/"

    @property
    def words(self) -> list[str]:
        return [self.GROUP, "--slots", "4", "--page-size", "5"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_GROUP": self.GROUP, "EDL_HVD_DISCOVERY_SLOTS": "4"}

    def show(self, count: int) -> list[str]:
        self.google.groups = {("zones/us-central1-a", self.GROUP): []}
        self.google.instances = {}
        self.google.add("another", "resnet50-of-another")
        return in_order((self.google.add(self.GROUP, f"resnet50-x{number:03}"), 4) for number in range(count))

    def behave(self, behaviour: str) -> None:
        self.google.behave(behaviour)

    def recover(self) -> None:
        self.google.behave("answer")

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {**self.doubts_named(DOUBTS), "no such group": self.lose_group}

    def lose_group(self) -> None:
        self.recover()
        self.google.groups.clear()

    def close(self) -> None:
        super().close()
        self.google.close()


GARBLED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda body: body[: len(body) // 2],
    "not xml": lambda body: b"upstream connect error",
    "a web page": lambda body: b"<html><body>Sign in to the hotel's network</body></html>",
    "nothing": lambda body: b"",
}
REFUSALS = {
    "throttled": (503, "RequestLimitExceeded"),
    "expired": (400, "RequestExpired"),
    "clock skew": (403, "RequestTimeTooSkewed"),
    "wrong credentials": (401, "AuthFailure"),
    "not allowed": (403, "UnauthorizedOperation"),
    "dry run": (412, "DryRunOperation"),
    "second page fails": (500, "InternalError"),
}


class Gate:
    """A proxy in front of a server; ``behave`` says what becomes of the requests.

    Attributes:
        questions: The body of every request so far.
        forbidden: An action of AWS that the account may not do.
        rewritten: What is replaced in answers to an action of AWS, and by what: what moto never says.
        unknown: Instances that EC2 does not know, each alone in its reservation.
    """

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://")
        self._behaviour = "forward"
        self._closing = threading.Event()
        self.questions: list[str] = []
        self.forbidden = ""
        self.rewritten: dict[str, tuple[bytes, bytes]] = {}
        self.unknown: tuple[str, ...] = ()
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
        """ "forward", "refuse" (hang up), "hang", "slow" (once), or a name of GARBLED or REFUSALS."""
        self._behaviour = behaviour

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.questions.append(body.decode())
        behaviour = self._behaviour
        request.close_connection = behaviour != "forward"
        if behaviour == "hang":
            self._closing.wait(600)
        if behaviour == "slow":
            self._behaviour = behaviour = "forward"
            self._closing.wait(SLOW_S)
        if behaviour in ("hang", "refuse"):
            return
        action = parse_qs(body.decode()).get("Action", [""])[0]
        if action == self.forbidden:
            behaviour = "not allowed"
        if behaviour in REFUSALS and (behaviour != "second page fails" or b"NextToken" in body):
            status, code = REFUSALS[behaviour]
            error = f"<Error><Code>{code}</Code><Message>as told</Message></Error>"
            forms = (
                "<Response><Errors>{}</Errors></Response>",
                "<ErrorResponse>{}</ErrorResponse>",
            )  # of EC2, and others
            self._reply(request, status, forms["AutoScaling" in action].format(error).encode())
            return
        status, content = self._forward(request, body)
        content = content.replace(*self.rewritten.get(action, (b"", b"")))
        if self.unknown and action == "DescribeInstances":
            content = _without_reservations(content, self.unknown)
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
        with suppress(ConnectionError):  # who asked may have been killed
            request.wfile.write(body)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()


def _without_reservations(content: bytes, unknown: tuple[str, ...]) -> bytes:
    """The answer to DescribeInstances without those that hold one of these instances."""
    answer = ElementTree.fromstring(content)
    space = answer.tag.partition("}")[0] + "}"
    reservations = answer.find(f"{space}reservationSet")
    assert reservations is not None
    for reservation in list(reservations):
        if reservation.findtext(f".//{space}instanceId") in unknown:
            reservations.remove(reservation)
    return ElementTree.tostring(answer)
