"""What Google Cloud has that is a host, and what is left out and why, asked of a server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from clocks import FakeClock
from discovery_clouds import ask, granted, source_of
from google_server import PROJECT, ZONE, GoogleServer
from waiting import soon

from edl_hvd.clock import SystemClock
from edl_hvd.discovery.source import Source
from edl_hvd.discovery.sources.google_api import RENEW_S, GoogleCloud
from edl_hvd.errors import DiscoveryError, UsageError


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    with GoogleServer() as server:
        yield server


def google_source(google: GoogleServer, *words: str) -> Source:
    at = (f"--metadata-host={google.host}", f"--endpoint={google.url}/compute/v1")
    return source_of("google", "resnet", *at, *words)


def test_members_of_a_group_of_google_count_while_they_run_and_are_left_alone(google: GoogleServer) -> None:
    good = [
        google.add("resnet", f"r-{action.lower()}", action=action) for action in ("NONE", "VERIFYING", "REFRESHING")
    ]
    google.add("resnet", "r-deleting", action="DELETING")
    google.add("resnet", "r-recreating", action="RECREATING", status="STOPPING")
    google.add("resnet", "r-preempted", status="STOPPING")
    google.add("resnet", "r-starting", status="STAGING")
    del google.instances[ZONE, "r-preempted"]
    source = google_source(google, "--slots=2")
    answer = source.answer()
    assert {entry.host: entry.slots for entry in answer.hosts} == dict.fromkeys(good, 2)
    assert answer.left_out == {
        f"{ZONE}/r-deleting": "its group is DELETING it",
        f"{ZONE}/r-recreating": "its group is RECREATING it",
        f"{ZONE}/r-preempted": "is STOPPING",
        f"{ZONE}/r-starting": "is STAGING",
    }


def test_an_instance_of_google_that_stops_between_two_answers_is_left_out(google: GoogleServer) -> None:
    google.add("resnet", "r-1")
    google.instances[ZONE, "r-1"]["status"] = "STOPPING"
    answer = google_source(google, "--slots=2").answer()
    assert answer.hosts == ()
    assert answer.left_out == {f"{ZONE}/r-1": "is STOPPING"}


def test_lists_of_google_that_contradict_each_other_are_doubt_and_drop_no_host(google: GoogleServer) -> None:
    for number in range(7):
        google.add("resnet", f"r-{number}")
    for number in range(3, 7):
        del google.instances[ZONE, f"r-{number}"]
    with pytest.raises(DiscoveryError, match=f"lists 7 running .* has only 3 of them, not {ZONE}/r-3, .*, \\.\\.\\.;"):
        google_source(google, "--slots=2").answer()


@pytest.mark.parametrize("words", [(), ("--token-file=/etc/token",)])
def test_a_token_of_google_never_goes_over_an_unencrypted_line(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"--endpoint 'http://10\.0\.0\.1/compute/v1' would get the token unencrypted"):
        source_of("google", "resnet", "--endpoint=http://10.0.0.1/compute/v1", *words)


def test_a_token_that_compute_engine_repeats_is_not_shown(google: GoogleServer, tmp_path: Path) -> None:
    google.add("resnet", "r-1")
    (tmp_path / "token").write_text("ya29.secret/token\n")
    google.repeats_tokens = True
    with pytest.raises(DiscoveryError) as raised:
        ask(
            google_source(
                google, f"--token-file={tmp_path}/token", "--slots=1", f"--project={PROJECT}", f"--zone={ZONE}"
            )
        )
    assert "no such token: ***" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_regional_group_of_google_has_instances_in_several_zones(google: GoogleServer) -> None:
    places = [("us-central1-a", "r-1"), ("us-central1-b", "r-1"), ("us-central1-b", "r-2")]
    addresses = [google.add("resnet", name, "regions/us-central1", zone, gpus=2) for zone, name in places]
    google.add("other", "r-2-of-another", "regions/us-central1", "us-central1-b", gpus=1)
    source = google_source(google, "--region=us-central1", "--page-size=1")
    answer = source.answer()
    assert {entry.host: entry.slots for entry in answer.hosts} == dict.fromkeys(addresses, 2)
    known = answer.details
    assert [known[address].zone for address in addresses] == [zone for zone, _ in places]
    assert known[addresses[0]].kind == "n1-standard-4"
    assert known[addresses[0]].since_s == datetime(2026, 11, 22, 10, tzinfo=timezone.utc).timestamp()


def test_the_gpus_of_an_instance_of_google_may_be_told_with_its_type(google: GoogleServer) -> None:
    kind = {"name": "a3-highgpu-8g", "accelerators": [{"guestAcceleratorType": "h100", "guestAcceleratorCount": 8}]}
    google.kinds["a3-highgpu-8g"] = kind
    addresses = [google.add("resnet", f"r-{number}", kind="a3-highgpu-8g") for number in range(3)]
    source = google_source(google)
    assert ask(source) == dict.fromkeys(addresses, 8)
    ask(source)
    assert sum("/machineTypes/" in question for question in google.questions) == 1


def test_an_instance_of_google_without_a_gpu_asks_for_slots(google: GoogleServer) -> None:
    google.add("resnet", "r-1")
    with pytest.raises(DiscoveryError, match="r-1 is a n1-standard-4 without a GPU; give --slots"):
        ask(google_source(google))


def test_the_health_check_of_a_group_of_google_counts_when_asked_for(google: GoogleServer) -> None:
    google.add("resnet", "r-1", health="UNHEALTHY")
    google.add("resnet", "r-2", health="HEALTHY")
    assert len(ask(google_source(google, "--slots=1"))) == 2
    answer = google_source(google, "--slots=1", "--healthy=yes").answer()
    assert len(answer.hosts) == 1
    assert answer.left_out == {f"{ZONE}/r-1": "fails its group's health check"}


def test_a_token_of_google_is_kept_and_renewed_once_when_it_is_refused(google: GoogleServer) -> None:
    google.add("resnet", "r-1")
    source = google_source(google, "--slots=1")
    for _ in range(3):
        ask(source)
    assert sum(question.endswith("/token") for question in google.questions) == 1
    google.renew_token()
    assert len(ask(source)) == 1
    assert sum(question.endswith("/token") for question in google.questions) == 2
    google.behave("wrong credentials")
    with pytest.raises(DiscoveryError, match="Invalid Credentials; the token is not valid"):
        ask(source)
    assert sum(question.endswith("/token") for question in google.questions) == 3


def test_a_token_of_google_is_renewed_before_it_expires(google: GoogleServer) -> None:
    class LaterClock(SystemClock):
        later_s = 0.0

        def monotonic_s(self) -> float:
            return super().monotonic_s() + self.later_s

    clock = LaterClock()
    cloud = GoogleCloud(google.host, f"{google.url}/compute/v1/", clock=clock)
    path = f"projects/{PROJECT}/zones/{ZONE}/machineTypes/n1-standard-4"
    tokens = []
    for later_s in (0, 3599 - RENEW_S - 300, 3599 - RENEW_S + 1):
        clock.later_s = later_s
        cloud.ask("GET", path, {})
        tokens.append(sum(question.endswith("/token") for question in google.questions))
    assert tokens == [1, 1, 2]


def test_a_token_of_google_may_come_from_a_file(google: GoogleServer, tmp_path: Path) -> None:
    google.add("resnet", "r-1")
    (tmp_path / "token").write_text("ya29.1\n")
    words = (f"--token-file={tmp_path}/token", "--slots=1", f"--project={PROJECT}", f"--zone={ZONE}")
    assert len(ask(google_source(google, *words))) == 1
    assert not any("computeMetadata" in question for question in google.questions)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("not allowed", "Required 'compute.instanceGroupManagers.get' permission; grant it .* roles/compute.viewer"),
        ("no scope", "insufficient authentication scopes; grant .* the scope compute-ro"),
        ("rate limited", "Rate Limit Exceeded; the project asks too often; raise --refresh"),
        ("throttled", "429: .* raise --refresh"),
        ("no account", "answered 404 to instance/service-accounts/default/token"),
        ("stranger", "the metadata server .* answered 200 to project/project-id"),
        ("refuse", "on a machine outside of Google Cloud give --project"),
    ],
)
def test_what_to_do_when_google_refuses(google: GoogleServer, behaviour: str, words: str) -> None:
    google.add("resnet", "r-1")
    google.behave(behaviour)
    with pytest.raises(DiscoveryError, match=words):
        ask(google_source(google))


def test_a_group_of_google_that_is_not_there_is_named(google: GoogleServer) -> None:
    with pytest.raises(DiscoveryError, match=f"{ZONE}/instanceGroupManagers/resnet/.* 404: .* look at the group"):
        ask(google_source(google))


@pytest.mark.parametrize(("behaviour", "expected"), [("answer", True), ("not allowed", False), ("throttled", None)])
def test_the_permissions_of_google_are_tried_one_by_one(
    google: GoogleServer, behaviour: str, expected: bool | None
) -> None:
    google.add("resnet", "r-1")
    google.behave(behaviour)
    assert granted(google_source(google)) == {
        "a project and a place": True,
        "compute.instanceGroupManagers.get": expected,
        "compute.instances.list": expected,
        "compute.machineTypes.get": expected,
    }


def test_where_there_is_no_metadata_server_no_permission_of_google_is_known(google: GoogleServer) -> None:
    google.behave("refuse")
    assert granted(google_source(google)) == {"a project and a place": None}


@pytest.mark.parametrize(("status", "text", "left_s"), [(429, "90", 90), (503, "90", 90), (503, "soon", None)])
def test_compute_engine_is_left_alone_for_as_long_as_it_asks(
    google: GoogleServer, tmp_path: Path, status: int, text: str, left_s: int | None
) -> None:
    (tmp_path / "token").write_text("ya29.token\n")
    asked: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Retry-After", text)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Requests are of no interest in a test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    clock = FakeClock()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}/compute/v1"
        cloud = GoogleCloud(google.host, endpoint, str(tmp_path / "token"), clock)
        with pytest.raises(DiscoveryError, match=f"refused instances: {status}"):
            cloud.ask("GET", "instances", {})
        if left_s is not None:
            clock.sleep(left_s - 1)
            with pytest.raises(DiscoveryError, match=r"asked to be left alone for another 1 s \(Retry-After\)"):
                cloud.ask("GET", "instances", {})
            assert len(asked) == 1
            clock.sleep(1)
        with pytest.raises(DiscoveryError, match=f"refused instances: {status}"):
            cloud.ask("GET", "instances", {})
        assert len(asked) == 2
    finally:
        server.shutdown()
        soon(thread)
        server.server_close()
