"""What platforms say about a host that will go, and what is told of it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from clocks import FakeClock

from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.http_client import seconds_since_epoch
from edl_hvd.notices.azure import read_events
from edl_hvd.notices.ec2 import read_action, read_rebalance
from edl_hvd.notices.google import read_state
from edl_hvd.notices.kubernetes import read_pod
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.platforms import PLATFORMS, Addresses, detect, find_providers
from edl_hvd.notices.watch import NoticeWatch, open_watch

NOON_S = seconds_since_epoch("2026-11-22T12:00:00Z")


class TestWhatPlatformsSay:
    @pytest.mark.parametrize(
        ("action", "at", "left_s"),
        [
            ("terminate", "12:02:00", 120),
            ("stop", "12:00:30", 30),
            ("hibernate", "12:02:00", 0),
            ("stop", "11:59:00", 0),
        ],
    )
    def test_ec2_names_the_time_of_an_interruption(self, action: str, at: str, left_s: float) -> None:
        notice = read_action(json.dumps({"action": action, "time": f"2026-11-22T{at}Z"}), NOON_S)
        assert (notice.kind, notice.deadline_s) == ("spot interruption", left_s)
        assert action in notice.words

    def test_a_recommendation_of_ec2_has_no_time(self) -> None:
        notice = read_rebalance('{"noticeTime": "2026-11-22T12:00:00Z"}')
        assert (notice.kind, notice.deadline_s) == ("rebalance recommendation", None)

    @pytest.mark.parametrize(
        ("preempted", "maintenance", "kind"),
        [
            ("FALSE", "NONE", None),
            ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", None),
            ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "host maintenance"),
            ("TRUE", "NONE", "preemption"),
            ("TRUE", "TERMINATE_ON_HOST_MAINTENANCE", "preemption"),
        ],
    )
    def test_google_preempts_or_stops_but_a_move_is_no_end(
        self, preempted: str, maintenance: str, kind: str | None
    ) -> None:
        notice = read_state(preempted, maintenance)
        assert (notice.kind if notice else None) == kind
        assert notice is None or 0 < (notice.deadline_s or 0) < 60

    def test_of_the_events_of_azure_the_earliest_that_ends_this_machine_counts(self) -> None:
        def event(kind: str, machine: str, time: str) -> dict[str, object]:
            return {"EventId": f"{kind}{time}", "EventType": kind, "Resources": [machine], "NotBefore": time}

        def read(*events: dict[str, object]) -> Notice | None:
            return read_events(json.dumps({"DocumentIncarnation": 1, "Events": events}), "vm-3", NOON_S)

        reboot = event("Reboot", "vm-3", "Sun, 22 Nov 2026 12:15:00 GMT")
        eviction = event("Preempt", "vm-3", "Sun, 22 Nov 2026 12:00:30 GMT")
        begun = event("Terminate", "vm-3", "")
        assert read() is None
        assert read(event("Freeze", "vm-3", ""), event("Preempt", "vm-33", "")) is None
        earliest = read(reboot, eviction)
        assert earliest is not None
        assert (earliest.kind, earliest.deadline_s) == ("spot eviction", 30)
        assert read(reboot, eviction, begun) == Notice("scheduled termination", 0, "", "Terminate")

    @pytest.mark.parametrize(("time", "left_s"), [("12:00:20", 20), ("11:59:00", 0), ("12:30:00", 30)])
    def test_a_pod_is_deleted_within_its_grace_period(self, time: str, left_s: float) -> None:
        metadata = {"deletionTimestamp": f"2026-11-22T{time}Z", "deletionGracePeriodSeconds": 30}
        notice = read_pod(json.dumps({"metadata": metadata}), NOON_S)
        assert notice is not None
        assert (notice.kind, notice.deadline_s) == ("pod deletion", left_s)
        assert read_pod('{"metadata": {"name": "worker-3"}}', NOON_S) is None

    @pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"metadata": 1}', "<html>", '{"action": "stop"}'])
    def test_what_is_not_understood_is_an_error_and_no_notice(self, text: str) -> None:
        readers: list[Callable[[], object]] = [
            lambda: read_action(text, NOON_S),
            lambda: read_rebalance(text),
            lambda: read_events(text, "vm-3", NOON_S),
            lambda: read_state(text, "NONE"),
        ]
        for read in readers:
            with pytest.raises(PlatformError):
                read()

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"metadata": 1}', '{"metadata": {"deletionTimestamp": "soon"}}'])
    def test_a_pod_that_is_not_understood_is_an_error(self, text: str) -> None:
        with pytest.raises(PlatformError, match="the pod is not understood"):
            read_pod(text, NOON_S)

    def test_a_time_without_its_zone_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no time zone"):
            seconds_since_epoch("2026-11-22T12:00:00")


class TestPlaces:
    @pytest.mark.parametrize(
        ("file", "text", "place"),
        [
            ("sys_vendor", "Amazon EC2\n", "ec2"),
            ("bios_version", "4.11.amazon\n", "ec2"),
            ("product_name", "Google Compute Engine\n", "google"),
            ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", "azure"),
            ("token", "eyJh\n", "kubernetes"),
            ("sys_vendor", "Microsoft Corporation\n", None),
        ],
    )
    def test_the_firmware_says_where_this_machine_is(
        self, tmp_path: Path, file: str, text: str, place: str | None
    ) -> None:
        (tmp_path / file).write_text(text)
        assert detect(str(tmp_path), str(tmp_path)) == ((place,) if place else ())

    def test_a_pod_of_a_cloud_belongs_to_both(self, tmp_path: Path) -> None:
        (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
        (tmp_path / "token").write_text("eyJh\n")
        found = find_providers("auto", Addresses(service_account=str(tmp_path)), str(tmp_path))
        assert [provider.name for provider in found] == ["ec2", "kubernetes"]

    def test_a_setting_names_one_or_none(self) -> None:
        assert [find_providers(name, Addresses())[0].name for name in PLATFORMS] == list(PLATFORMS)
        assert find_providers("off", Addresses()) == ()
        assert open_watch("off", print) is None
        with pytest.raises(UsageError, match="accepted: off, auto, ec2, google, azure, kubernetes"):
            find_providers("aws", Addresses())


class Puppet:
    """A platform that says what it was given, one thing for each question, and the last one for ever."""

    def __init__(self, *answers: Notice | Exception | None, every_s: float = 5.0, name: str = "puppet") -> None:
        self.name, self.every_s = name, every_s
        self._answers = list(answers)
        self.questions = 0

    def ask(self) -> Notice | None:
        self.questions += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def interruption(deadline_s: float) -> Notice:
    return Notice("spot interruption", deadline_s, "it goes", "12:02")


RISK = Notice("rebalance recommendation", None, "it may go", "12:00")


class TestWatch:
    def test_each_notice_is_told_once_however_often_it_is_heard(self) -> None:
        clock, told = FakeClock(), []
        platform = Puppet(None, RISK, RISK, interruption(120), None, interruption(115))
        watch = NoticeWatch([platform], told.append, clock=clock)
        for _ in range(6):
            clock.sleep(watch.ask_those_due())
        assert platform.questions == 6
        assert [(notice.kind, notice.deadline_s) for notice in told] == [
            ("rebalance recommendation", None),
            ("spot interruption", 120),
        ]

    def test_every_platform_is_asked_at_its_own_pace(self) -> None:
        clock = FakeClock()
        quick, slow = Puppet(None, every_s=2), Puppet(None, every_s=5)
        watch = NoticeWatch([quick, slow], print, clock=clock)
        started_s = clock.now_s
        while clock.now_s < started_s + 10:
            clock.sleep(watch.ask_those_due())
        assert (quick.questions, slow.questions) == (5, 2)

    def test_or_at_the_pace_that_is_asked_for(self) -> None:
        watch = NoticeWatch([Puppet(None), Puppet(None)], print, every_s=0.5, clock=FakeClock())
        assert watch.ask_those_due() == 0.5

    def test_an_outage_is_logged_once_and_changes_nothing_else(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        clock, told = FakeClock(), []
        platform = Puppet(PlatformError("down"), ZeroDivisionError(), None, PlatformError("down"), interruption(120))
        watch = NoticeWatch([platform, Puppet(None)], told.append, clock=clock)
        for _ in range(5):
            clock.sleep(watch.ask_those_due())
        assert told == [interruption(120)]
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("INFO", "no notices of puppet for now, requests go on: down")
        ]

    def test_a_watch_that_is_stopped_tells_no_more(self) -> None:
        heard = threading.Event()
        told: list[Notice] = []

        def tell(notice: Notice) -> None:
            told.append(notice)
            heard.set()

        class Chatty(Puppet):
            def ask(self) -> Notice | None:
                return Notice("preemption", 30, "", str(len(told)))

        watch = NoticeWatch([Chatty(None)], tell, every_s=0)
        watch.start()
        assert heard.wait(60)
        watch.stop()
        count = len(told)
        assert not [thread for thread in threading.enumerate() if thread.name == "edl_hvd notices"]
        assert len(told) == count

    def test_a_watch_can_be_stopped_by_what_it_tells(self) -> None:
        stopped = threading.Event()

        def stop(notice: Notice) -> None:
            watch.stop()
            stopped.set()

        watch = NoticeWatch([Puppet(RISK)], stop, every_s=0)
        watch.start()
        assert stopped.wait(60)
        watch.stop()
