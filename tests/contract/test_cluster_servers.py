"""Kubernetes and addresses, asked over real sockets: pages, renewed tokens, deletions, what need not be sent again."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import FakeClock
from discovery_clusters import KubernetesScene, UrlScene
from kubernetes_server import KubernetesServer, ListServer, ToldServer, deleted, make_certificate, pod
from waiting import soon

from edl_hvd.clock import SystemClock
from edl_hvd.discovery.source import Answer
from edl_hvd.discovery.sources.kubernetes import Kubernetes
from edl_hvd.discovery.sources.url import Url
from edl_hvd.discovery.sources.web import LONGEST_RETRY_S, http_get
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots


class Cluster:
    """An API server, and a source that asks it as a pod does."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.token = folder / "ca.crt", folder / "token"
        make_certificate(folder / "server.pem", self.authority)
        self.server = KubernetesServer("training", folder / "server.pem")
        self.server.token = "first"
        self.token.write_text("first\n")

    def source(self, selector: str = "app=trainer", **changes: object) -> Kubernetes:
        given = {"namespace": "training", "token_file": str(self.token), "ca_file": str(self.authority), **changes}
        return Kubernetes(selector, self.server.url, **given)  # type: ignore[arg-type]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.server.close()


@pytest.fixture
def server() -> Iterator[ListServer]:
    made = ListServer()
    yield made
    made.close()


def test_every_page_is_read_and_only_ready_pods_with_the_labels_count(cluster):
    cluster.server.pods = [pod(f"w{number}", f"10.0.0.{number}", gpus=2) for number in range(1, 8)]
    cluster.server.pods += [pod("other", "10.0.1.1", app="web"), pod("late", "10.0.1.2", ready=False)]
    answer = cluster.source(page_size=3).answer()
    assert answer.hosts == tuple(HostSlots(f"10.0.0.{number}", 2) for number in range(1, 8))
    assert len(cluster.server.questions) == 3
    assert answer.left_out == {"late": "it is not ready: containers with unready status: [worker]"}
    assert answer.details["10.0.0.1"].zone == "node-of-w1"


def test_a_list_that_expires_is_read_anew(cluster):
    cluster.server.pods = [pod(f"w{number}", f"10.0.0.{number}") for number in range(1, 6)]
    cluster.server.expiries = 2
    assert len(cluster.source(page_size=2).answer().hosts) == 5
    assert [status for _, status in cluster.server.questions] == [200, 410, 200, 410, 200, 200, 200]
    cluster.server.expiries = 100
    with pytest.raises(DiscoveryError, match="expired 3 times"):
        cluster.source(page_size=2).answer()


def test_a_pod_that_is_being_deleted_is_left_out_at_once_and_announced(cluster):
    stays, goes = pod("stays", "10.0.0.1"), pod("goes", "10.0.0.2")
    cluster.server.pods = [stays, deleted(goes, 30)]
    source = cluster.source()
    answer = source.answer()
    assert answer.hosts == (HostSlots("10.0.0.1", 4),)
    assert answer.left_out["goes"].startswith("it is being deleted, and gone by 20")
    (seconds,) = answer.notices.values()
    assert 0 < seconds <= 31
    # Its successor may get the same address.
    cluster.server.pods = [stays, deleted(goes, 30), pod("successor", "10.0.0.2")]
    answer = source.answer()
    assert (len(answer.hosts), answer.notices) == (2, {})


def test_a_renewed_token_is_used_at_once(cluster):
    cluster.server.pods = [pod("w", "10.0.0.1")]
    source = cluster.source()
    assert len(source.answer().hosts) == 1
    cluster.server.token = "second"
    with pytest.raises(DiscoveryError, match=r"status 401: as told: Unauthorized; the token is not valid"):
        source.answer()
    cluster.token.write_text("second\n")
    assert len(source.answer().hosts) == 1
    assert [status for _, status in cluster.server.questions] == [200, 401, 200]


def test_a_token_that_is_renewed_between_reading_and_asking_costs_one_more_question(cluster):
    cluster.server.pods = [pod("w", "10.0.0.1")]
    cluster.server.token = "second"

    class Renewing(Kubernetes):
        def _get(self, path, token, context):
            cluster.token.write_text("second\n")
            return super()._get(path, token, context)

    source = Renewing("app=trainer", cluster.server.url, "training", str(cluster.token), str(cluster.authority))
    assert len(source.answer().hosts) == 1
    assert [status for _, status in cluster.server.questions] == [401, 200]


def test_a_server_that_cannot_prove_who_it_is_gets_no_token(cluster, tmp_path):
    make_certificate(tmp_path / "other.pem", tmp_path / "other.crt")
    with pytest.raises(DiscoveryError, match=r"the certificate of https://127\.0\.0\.1:[0-9]+/api.* is not trusted"):
        cluster.source(ca_file=str(tmp_path / "other.crt")).answer()
    make_certificate(tmp_path / "elsewhere.pem", tmp_path / "elsewhere.crt", address="10.0.0.1")
    elsewhere = KubernetesServer("training", tmp_path / "elsewhere.pem")
    try:
        with pytest.raises(DiscoveryError, match=r"is not trusted: .*IP address mismatch"):
            Kubernetes("a=b", elsewhere.url, "training", str(cluster.token), str(tmp_path / "elsewhere.crt")).answer()
    finally:
        elsewhere.close()
    assert cluster.server.questions == elsewhere.questions == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"status": {"phase": "Running"}, "spec": {}}, "it is not ready"),
        ({"metadata": {}}, "lists something that is not a pod: KeyError"),
        ({"spec": {"containers": [{}]}}, "pod w may use no nvidia.com/gpu; give it some, or give --slots"),
        ({"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1k"}}}]}}, "ValueError"),
    ],
)
def test_a_pod_that_makes_no_sense_is_an_error_and_no_host(cluster, broken, words):
    cluster.server.pods = [pod("w", "10.0.0.1") | broken]
    cluster.server.pods[0].setdefault("metadata", {}).setdefault("labels", {"app": "trainer"})
    source = cluster.source()
    try:
        answer = source.answer()
        assert answer.hosts == ()
        told = " ".join(answer.left_out.values())
    except DiscoveryError as error:
        told = str(error)
    assert words in told


def test_the_ipv4_address_of_a_pod_counts_and_another_cannot_be_written(cluster):
    both = pod("w", "fd00::7")
    both["status"]["podIPs"] = [{"ip": "fd00::7"}, {"ip": "10.0.0.7"}]
    cluster.server.pods = [both]
    assert cluster.source().answer().hosts == (HostSlots("10.0.0.7", 4),)
    both["status"]["podIPs"] = [{"ip": "fd00::7"}]
    with pytest.raises(DiscoveryError, match="pod w has no IPv4 address"):
        cluster.source().answer()


def test_what_kubernetes_permits_is_told_one_by_one(cluster):
    told = list(cluster.source().permissions())
    assert [(one.name, one.granted) for one in told] == [
        (f"read {cluster.token}", True), ("list pods in namespace training", True)]  # fmt: skip
    cluster.server.behave("not allowed")
    one = list(cluster.source().permissions())[-1]
    assert (one.granted, one.words.endswith("allow its service account to list pods in this namespace")) == (
        False,
        True,
    )
    cluster.server.behave("refuse")
    assert [one.granted for one in cluster.source().permissions()] == [True, None]
    cluster.token.unlink()
    assert [one.granted for one in cluster.source().permissions()] == [False]


def test_an_unchanged_list_is_not_sent_again(server):
    server.body = json.dumps({"hosts": [{"host": "a", "slots": 1, "kind": "p3", "notice_s": 60}]}).encode()
    source = Url(f"{server.url}/job")
    answers = [source.answer() for _ in range(3)]
    assert [answer.hosts for answer in answers] == [(HostSlots("a", 1),)] * 3
    assert answers[2].details["a"].kind == "p3"
    assert 0 < answers[2].notices["a"] < answers[0].notices["a"] == 60
    server.body = b'{"b": 2}'
    assert source.answer() == Answer((HostSlots("b", 2),))
    assert [status for _, status in server.questions] == [200, 304, 304, 200]


def test_a_redirect_is_followed_on_the_same_host_only():
    places = {"/a": "/b", "/b": "c?x=1", "/circle": "/circle", "/away": "http://localhost:1/a"}

    class Redirecting(ToldServer):
        def answer(self, path, headers):
            place = places.get(path)
            return (302, {"Location": place}, b"") if place else (200, {}, b'{"a": 1}')

    server = Redirecting()
    server.token = "first"
    try:
        headers = {"Authorization": "Bearer first"}
        assert http_get(f"{server.url}/a", headers).body == b'{"a": 1}'
        assert [path for path, _ in server.questions] == ["/a", "/b", "/c?x=1"]
        with pytest.raises(DiscoveryError, match="sends elsewhere, to 'http://localhost:1/a'"):
            http_get(f"{server.url}/away", headers)
        with pytest.raises(DiscoveryError, match="redirects more than 3 times"):
            http_get(f"{server.url}/circle", headers)
    finally:
        server.close()


class HurriedClock(SystemClock):
    """Half a second passes with every look."""

    looks = 0

    def monotonic_s(self) -> float:
        self.looks += 1
        return self.looks / 2


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nETag: "])
def test_a_server_that_trickles_header_bytes_is_given_up(start):
    """It ends by itself after 400 bytes, which is no answer either."""
    listening = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(start)
            for _ in range(400):
                connection.sendall(b"a")
                time.sleep(0.001)

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/job"
        with pytest.raises(DiscoveryError, match=r"/job did not answer within 20 s"):
            http_get(url, {}, whole_s=20.0, clock=HurriedClock())
    finally:
        listening.close()
        soon(thread)


class Refusing(ToldServer):
    """Refuses with this status and these headers, and repeats the token that it was given."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__()
        self.reply = (status, {name.replace("_", "-"): value for name, value in headers.items()})

    def answer(self, path, headers):
        status, told = self.reply
        return status, told, f"no such token: {headers['Authorization']}, {path}".encode()


@pytest.mark.parametrize(
    ("status", "text", "left_s"),
    [
        (429, "120", 120),
        (503, "120", 120),
        (503, "86400", LONGEST_RETRY_S),
        (503, "Tue, 01 Jan 2030 00:02:00 GMT", 120),
        (503, "soon", None),
        (500, "120", None),
    ],
)
@pytest.mark.parametrize("kind", ["url", "kubernetes"])
def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(kind, status, text, left_s):
    server, clock = Refusing(status, Retry_After=text, Date="Tue, 01 Jan 2030 00:00:00 GMT"), FakeClock()
    try:
        source = Url(server.url, clock=clock) if kind == "url" else Kubernetes("a=b", server.url, "n", clock=clock)
        with pytest.raises(DiscoveryError, match=f"status {status}"):
            source.answer()
        if left_s is not None:
            clock.sleep(left_s - 1)
            with pytest.raises(DiscoveryError, match=r"asked to be left alone for another 1 s \(Retry-After\)"):
                source.answer()
            assert len(server.questions) == 1
            clock.sleep(1)
        with pytest.raises(DiscoveryError, match=f"status {status}"):
            source.answer()
        assert len(server.questions) == 2
    finally:
        server.close()


@pytest.mark.parametrize("token", ["s3cret", "s3cret/+=="])
def test_a_token_that_a_server_repeats_is_not_shown(tmp_path, token):
    (tmp_path / "token").write_text(f"{token}\n")
    server = Refusing(401)
    try:
        with pytest.raises(DiscoveryError) as raised:
            Url(f"{server.url}/job", token_file=str(tmp_path / "token")).answer()
        assert "no such token: Bearer ***, /job" in str(raised.value)
        server.reply = (302, {"Location": f"http://example.invalid/?token={token}"})
        with pytest.raises(DiscoveryError, match=r"sends elsewhere, to .*token=\*\*\*'"):
            Url(f"{server.url}/job", token_file=str(tmp_path / "token")).answer()
    finally:
        server.close()


def test_a_server_that_hangs_or_trickles_is_given_up(server):
    server.behave("hang")
    with pytest.raises(DiscoveryError, match=r"did not answer within 0\.05 s"):
        http_get(server.url, {}, socket_s=0.05)

    class Trickle(ListServer):
        def handle(self, request):
            request.send_response(200)
            request.end_headers()
            while not self._closing.wait(0.005):
                request.wfile.write(b"a")

    trickle = Trickle()
    try:
        with pytest.raises(DiscoveryError, match="did not answer"):
            http_get(trickle.url, {}, socket_s=5.0, whole_s=0.05)
    finally:
        trickle.close()


def test_a_name_that_no_resolver_answers_for_is_given_up_and_asked_for_once(server, monkeypatch):
    resolve, released, asked = socket.getaddrinfo, threading.Event(), []

    def hang(host, *arguments, **named):
        if host != "hosts.example.com":
            return resolve(host, *arguments, **named)
        asked.append(host)
        assert released.wait(60)
        return resolve("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    port = server.url.rpartition(":")[2]
    url = f"http://hosts.example.com:{port}/job"
    told = r"^asking http://hosts.example.com:[0-9]+/job failed: the name hosts.example.com was not looked up within "
    try:
        for _ in range(3):
            with pytest.raises(DiscoveryError, match=told + r"0\.05 s; ask the resolver"):
                http_get(url, {}, socket_s=0.05)
        with pytest.raises(DiscoveryError, match=told + r"0\.0\d+ s"):
            http_get(url, {}, whole_s=0.05)
        assert http_get(server.url, {}).status == 200, "another name is looked up meanwhile"
        assert len(asked) == 1
    finally:
        released.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "look up hosts.example.com"]:
        soon(thread)
    assert http_get(url, {}).status == 200, "it is asked for anew"
    assert len(asked) == 2
    assert http_get(url, {}).status == 200, "no answer is kept, not even for a moment"
    assert len(asked) == 3


def test_of_the_addresses_of_a_name_the_first_that_takes_connections_is_asked(server, monkeypatch):
    resolve = socket.getaddrinfo
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there

        def both(host, port, *arguments, **named):
            return [
                *resolve(*closed.getsockname(), *arguments, **named),
                *resolve("127.0.0.1", port, *arguments, **named),
            ]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert http_get(f"{server.url}/job", {}).status == 200
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **named: resolve(*closed.getsockname(), **named))
        with pytest.raises(DiscoveryError, match="ConnectionRefusedError"):
            http_get(f"{server.url}/job", {})


def test_a_name_that_there_is_not_is_said_so(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DiscoveryError, match=r"hosts\.example\.com/job failed: gaierror: .*Name or service not known"):
        http_get("http://hosts.example.com/job", {})


def test_an_answer_without_end_is_given_up(server, monkeypatch):
    monkeypatch.setattr("edl_hvd.discovery.sources.web.LONGEST_BODY_BYTES", 1000)
    server.body = b"x" * 2000
    with pytest.raises(DiscoveryError, match="answered with more than"):
        http_get(server.url, {})


def test_what_an_address_permits_is_told(server):
    server.body = b'{"a": 1}'
    (one,) = Url(f"{server.url}/job?secret=7").permissions()
    assert (one.name, one.granted, one.words) == (f"GET {server.url}/job", True, "status 200")
    server.behave("not allowed")
    (one,) = Url(f"{server.url}/job").permissions()
    assert one.granted is False
    server.behave("refuse")
    (one,) = Url(f"{server.url}/job").permissions()
    assert one.granted is None


@pytest.mark.parametrize("kind", [KubernetesScene, UrlScene])
def test_a_script_is_asked_once_per_refresh_and_goes_on_with_a_renewed_token(kind, tmp_path):
    scene = kind(tmp_path)
    try:
        lines = scene.show(3)
        for _ in range(3):
            assert scene.poll().stdout.splitlines() == lines
        assert len(scene.server.questions) == 1
        scene.server.token = "second"
        scene.let_pass(10)
        bridged = scene.poll_until(lambda result: result.stderr != "")
        assert bridged.stdout.splitlines() == lines
        assert "401" in bridged.stderr
        scene.write_token("second")
        scene.let_pass(10)
        assert scene.poll_until(lambda result: result.stderr == "").stdout.splitlines() == lines
    finally:
        scene.close()


@pytest.mark.parametrize("kind", [KubernetesScene, UrlScene])
def test_a_slow_server_is_not_waited_for_and_its_answer_counts_when_it_comes(kind, tmp_path):
    scene = kind(tmp_path)
    try:
        before = scene.show(2)
        assert scene.poll().stdout.splitlines() == before
        after = scene.show(3)
        scene.server.behave("slow")
        scene.let_pass(10)
        for _ in range(3):
            assert scene.poll().stdout.splitlines() == before
        assert len(scene.server.questions) == 1
        scene.server.behave("answer")
        assert scene.poll_until(lambda result: result.stdout.count("\n") == 3).stdout.splitlines() == after
    finally:
        scene.close()
