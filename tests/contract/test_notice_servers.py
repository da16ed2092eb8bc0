"""Notices as real servers give them: tokens, headers, outages, clocks that are wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from kubernetes_server import make_certificate
from metadata_server import AzureMetadata, Ec2Metadata, GoogleMetadata, KubernetesPod, Server

from edl_hvd.clock import SystemClock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import seconds_since_epoch
from edl_hvd.notices.azure import AzureNotices
from edl_hvd.notices.ec2 import RENEW_S, TOKEN_S, Ec2Notices
from edl_hvd.notices.google import GoogleNotices
from edl_hvd.notices.kubernetes import KubernetesNotices
from edl_hvd.notices.notice import Notice, Provider
from edl_hvd.notices.platforms import Addresses
from edl_hvd.notices.watch import NoticeWatch, open_watch

NOON_S = seconds_since_epoch("2026-11-22T12:00:00Z")


class Tale:
    """A platform, a provider that asks it, and how it announces the end, in ``left_s`` seconds or at no known time."""

    def __init__(self, server: Server, provider: Provider, announce: Callable[[], None], left_s: float) -> None:
        self.server, self.provider, self.announce, self.left_s = server, provider, announce, left_s


def of_ec2(folder: Path) -> Tale:
    server = Ec2Metadata()
    action = '{"action": "terminate", "time": "2026-11-22T12:02:00Z"}'
    return Tale(server, Ec2Notices(server.url), lambda: server.texts.update({"spot/instance-action": action}), 120)


def of_google(folder: Path) -> Tale:
    server = GoogleMetadata()
    return Tale(server, GoogleNotices(server.url), lambda: server.texts.update({"instance/preempted": "TRUE"}), 28)


def of_azure(folder: Path) -> Tale:
    server = AzureMetadata()
    event = server.event("Preempt", formatdate(NOON_S + 30, usegmt=True))
    return Tale(server, AzureNotices(server.url), lambda: server.events.append(event), 30)


def of_kubernetes(folder: Path) -> Tale:
    server = KubernetesPod()
    (folder / "token").write_text("first")
    (folder / "namespace").write_text("training")
    deleted = {"deletionTimestamp": "2026-11-22T12:00:25Z", "deletionGracePeriodSeconds": 30}
    provider = KubernetesNotices(server.url, str(folder), "worker-3")
    return Tale(server, provider, lambda: server.metadata.update(deleted), 25)


@pytest.fixture(params=[of_ec2, of_google, of_azure, of_kubernetes], ids=lambda make: make.__name__)
def tale(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tale]:
    made = request.param(tmp_path)
    made.server.wall_s = NOON_S  # which is not the time of this machine
    yield made
    made.server.close()


@pytest.fixture
def ec2() -> Iterator[Ec2Metadata]:
    with Ec2Metadata() as server:
        yield server


def test_there_is_no_notice_until_there_is_one(tale: Tale) -> None:
    assert tale.provider.ask() is None
    tale.announce()
    notice = tale.provider.ask()
    assert notice is not None
    assert notice.words
    assert tale.provider.ask() == notice


def test_the_time_that_is_left_is_counted_by_the_platforms_clock(tale: Tale) -> None:
    tale.announce()
    notice = tale.provider.ask()
    assert notice is not None
    assert notice.deadline_s == tale.left_s


@pytest.mark.parametrize("behaviour", ["refuse", "cut off"])
def test_a_platform_in_trouble_is_an_error_and_later_it_is_asked_again(tale: Tale, behaviour: str) -> None:
    tale.announce()
    tale.server.behave(behaviour)
    with pytest.raises(PlatformError):
        tale.provider.ask()
    tale.server.behave("answer")
    assert tale.provider.ask() is not None


def test_a_platform_that_hangs_is_given_up(tale: Tale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_hvd.notices.request.SOCKET_S", 0.05)
    tale.server.behave("hang")
    with pytest.raises(PlatformError, match="did not answer"):
        tale.provider.ask()


def test_a_server_that_is_not_there_is_an_error() -> None:
    for provider in (
        Ec2Notices("http://127.0.0.1:1"),
        GoogleNotices("http://127.0.0.1:1"),
        AzureNotices("http://127.0.0.1:1"),
    ):
        with pytest.raises(PlatformError, match="did not answer"):
            provider.ask()


def test_the_watch_tells_each_notice_once_through_an_outage(tale: Tale) -> None:
    told: list[Notice] = []
    heard = threading.Event()

    def tell(notice: Notice) -> None:
        told.append(notice)
        heard.set()

    def wait_for_questions(count: int) -> None:
        more = len(tale.server.questions) + count
        while len(tale.server.questions) < more:
            threading.Event().wait(0.005)

    watch = NoticeWatch([tale.provider], tell, every_s=0.001)
    watch.start()
    wait_for_questions(4)
    tale.server.behave("refuse")
    wait_for_questions(4)
    assert told == []
    tale.announce()
    tale.server.behave("answer")
    assert heard.wait(60)
    wait_for_questions(8)
    watch.stop()
    assert [notice.kind for notice in told] == [told[0].kind]


def test_a_token_of_ec2_is_kept_and_renewed_when_it_is_refused(ec2: Ec2Metadata) -> None:
    provider = Ec2Notices(ec2.url)
    for _ in range(3):
        assert provider.ask() is None
    assert ec2.tokens == 1
    ec2.forget_tokens()
    assert provider.ask() is None
    assert ec2.tokens == 2


def test_a_token_of_ec2_is_renewed_before_it_expires(ec2: Ec2Metadata) -> None:
    class LaterClock(SystemClock):
        later_s = 0.0

        def monotonic_s(self) -> float:
            return super().monotonic_s() + self.later_s

    clock = LaterClock()
    provider = Ec2Notices(ec2.url, clock)
    provider.ask()
    clock.later_s = TOKEN_S - RENEW_S - 60
    provider.ask()
    assert ec2.tokens == 1
    clock.later_s = TOKEN_S - RENEW_S + 1
    provider.ask()
    assert ec2.tokens == 2
    assert "GET /latest/meta-data/spot/instance-action" in ec2.questions


def test_an_interruption_of_ec2_is_more_than_a_recommendation(ec2: Ec2Metadata) -> None:
    provider = Ec2Notices(ec2.url)
    ec2.texts["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-22T11:50:00Z"}'
    first = provider.ask()
    ec2.texts["spot/instance-action"] = '{"action": "stop", "time": "2026-11-22T12:02:00Z"}'
    second = provider.ask()
    assert first is not None
    assert second is not None
    assert (first.kind, second.kind) == ("rebalance recommendation", "spot interruption")


def test_who_is_not_google_is_not_believed(ec2: Ec2Metadata) -> None:
    with pytest.raises(PlatformError, match="answered 401"):
        GoogleNotices(ec2.url).ask()


def test_a_pod_reads_its_token_anew(tmp_path: Path) -> None:
    tale = of_kubernetes(tmp_path)
    assert tale.provider.ask() is None
    assert isinstance(tale.server, KubernetesPod)
    tale.server.token = "second"
    with pytest.raises(PlatformError, match="answered 401"):
        tale.provider.ask()
    (tmp_path / "token").write_text("second")
    assert tale.provider.ask() is None
    tale.server.close()


def test_a_pod_believes_the_api_server_of_its_own_cluster_only(tmp_path: Path) -> None:
    make_certificate(tmp_path / "server.pem", tmp_path / "ca.crt")
    make_certificate(tmp_path / "other.pem", tmp_path / "other.crt")
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("training")
    with KubernetesPod(tmp_path / "server.pem") as server:
        provider = KubernetesNotices(server.url, str(tmp_path), "worker-3")
        assert provider.ask() is None
        server.metadata.update(deletionTimestamp="2026-11-22T12:00:25Z", deletionGracePeriodSeconds=30)
        assert provider.ask() is not None
        (tmp_path / "other.crt").replace(tmp_path / "ca.crt")
        asked = len(server.questions)
        with pytest.raises(PlatformError, match="CERTIFICATE_VERIFY_FAILED"):
            provider.ask()
        assert len(server.questions) == asked


def test_a_pod_without_a_service_account_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"cannot read .*namespace"):
        KubernetesNotices("http://127.0.0.1:1", str(tmp_path), "worker-3").ask()
    (tmp_path / "namespace").write_text("training")
    (tmp_path / "token").write_text("first")
    with pytest.raises(PlatformError, match=r"cannot use .*ca\.crt"):
        KubernetesNotices("https://127.0.0.1:1", str(tmp_path), "worker-3").ask()


def test_a_watch_is_opened_by_the_name_of_the_platform(ec2: Ec2Metadata) -> None:
    ec2.texts["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-22T12:02:00Z"}'
    heard = threading.Event()
    watch = open_watch("ec2", lambda notice: heard.set(), Addresses(ec2=ec2.url))
    assert watch is not None
    assert heard.wait(60)
    watch.stop()


def test_notices_need_the_standard_library_alone() -> None:
    program = (
        "import sys, edl_hvd.notices.watch; "
        "print([name for name in ('torch', 'boto3', 'botocore', 'horovod', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
