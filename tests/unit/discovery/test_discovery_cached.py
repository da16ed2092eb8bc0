"""When a kept answer is given, doubted, refused or replaced; in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.discovery.polling import cached
from edl_hvd.discovery.polling.cached import CacheEntry, ask, find_answer
from edl_hvd.discovery.polling.record import FAILURE_CHARACTERS, Record
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots

ANSWER = "a:1\nb:2\n"


@dataclass
class FakeSource(Source):
    """Answers with each of ``answers`` in turn; an exception is raised."""

    answers: list[tuple[HostSlots, ...] | Exception] = field(default_factory=list)

    def answer(self) -> Answer:
        hosts = self.answers.pop(0)
        if isinstance(hosts, Exception):
            raise hosts
        return Answer(hosts)


class FakeEntry(CacheEntry):
    """Keeps in memory; asking takes ``delay_s`` of virtual time, or for ever when it is ``None``."""

    def __init__(self, record: Record, clock: FakeClock, delay_s: float | None = 0.01) -> None:
        self.record = record
        self.clock = clock
        self.delay_s = delay_s
        self.done_s: float | None = None
        self.question: PolledSource | None = None

    def touch(self) -> None:
        pass

    def read(self) -> Record:
        if self.done_s is not None and self.clock.now_s >= self.done_s and self.question:
            self.done_s = None
            ask(self.question, self, self.clock)
        return self.record

    def write(self, record: Record, refresh_s: float) -> None:
        self.record = record

    def start_refresher(self, question: PolledSource, since_s: float, clock: object) -> bool:
        self.question = question
        if self.delay_s is not None and self.done_s is None:
            self.done_s = self.clock.now_s + self.delay_s
        return True


def question(*answers: tuple[HostSlots, ...] | Exception, refresh_s: float = 10, stale_s: float = 300) -> PolledSource:
    return PolledSource(FakeSource(list(answers)), refresh_s=refresh_s, stale_s=stale_s, first_s=20)


def known(age_s: float, **changes: float | str | int) -> Record:
    """A good answer whose question was put ``age_s`` before 1000."""
    at_s = 1000.0 - age_s
    return Record(began_s=0.0, asked_s=at_s, answered_s=at_s, answer=ANSWER, **changes)  # type: ignore[arg-type]


def test_a_fresh_answer_is_given_without_asking() -> None:
    clock = FakeClock()
    assert find_answer(question(), FakeEntry(known(age_s=9.9), clock), clock) == (ANSWER, "")
    assert clock.now_s == 1000.0


def test_an_answer_that_is_due_is_given_at_once_while_a_newer_one_is_fetched() -> None:
    clock = FakeClock()
    assert find_answer(question(), FakeEntry(known(age_s=11), clock, delay_s=None), clock) == (ANSWER, "")
    assert clock.now_s == 1000.0


def test_an_old_answer_is_given_with_a_doubt() -> None:
    clock = FakeClock()
    asking = replace(known(age_s=250), asked_s=995.0)
    answer, doubt = find_answer(question(), FakeEntry(asking, clock, delay_s=None), clock)
    assert (answer, clock.now_s) == (ANSWER, 1000.0)
    assert doubt == "giving the answer of 250 s ago, good for 300 s: a newer one is on its way"


def test_the_first_poll_of_a_job_waits_for_an_answer_of_its_own() -> None:
    """Hosts of the job before may have ended since."""
    clock = FakeClock()
    entry = FakeEntry(known(age_s=250), clock, delay_s=0.5)
    assert find_answer(question((HostSlots("c", 3),)), entry, clock) == ("c:3\n", "")
    late = FakeEntry(known(age_s=250), clock := FakeClock(), delay_s=0.01)
    answer, doubt = find_answer(question(DiscoveryError("throttled")), late, clock)
    assert (answer, doubt) == (ANSWER, "giving the answer of 250 s ago, good for 300 s: throttled")


def test_the_first_poll_of_a_job_goes_back_to_an_older_answer_when_its_time_is_over() -> None:
    clock = FakeClock()
    begun = replace(known(age_s=250), began_s=999.9, asked_s=999.9)
    answer, doubt = find_answer(question(), FakeEntry(begun, clock, delay_s=None), clock)
    assert answer == ANSWER
    assert "did not answer within 19.9 s" in doubt or "did not answer within 20.0 s" in doubt


def test_a_poll_that_runs_out_of_time_does_not_repeat_an_earlier_failure() -> None:
    clock = FakeClock()
    asking = Record(began_s=900.0, asked_s=999.0, failed_s=989.0, failure="throttled")
    with pytest.raises(DiscoveryError, match=r"^the source did not answer within 0\.8 s$"):
        find_answer(question(), FakeEntry(asking, clock, delay_s=None), clock)


def test_an_answer_that_is_too_old_is_refused_within_the_time_of_a_poll() -> None:
    clock = FakeClock()
    with pytest.raises(DiscoveryError, match=r"did not answer within 0\.8 s.* 301 s old"):
        find_answer(question(), FakeEntry(known(age_s=300.5), clock, delay_s=None), clock)
    assert clock.now_s == pytest.approx(1000 + cached.ANSWER_S, abs=cached.LONGEST_LOOK_S)


def test_the_first_poll_waits_longer_than_the_others() -> None:
    clock = FakeClock()
    begun = Record(began_s=1000.0, asked_s=1000.0)
    with pytest.raises(DiscoveryError, match="did not answer within 20"):
        find_answer(question(), FakeEntry(begun, clock, delay_s=None), clock)
    with pytest.raises(DiscoveryError, match=r"did not answer within 0\.8"):
        find_answer(question(), FakeEntry(begun, clock, delay_s=None), clock)


def test_a_known_failure_is_reported_at_once() -> None:
    clock = FakeClock()
    failed = Record(began_s=990.0, asked_s=999.0, failed_s=999.0, failure="throttled")
    with pytest.raises(DiscoveryError, match="throttled"):
        find_answer(question(), FakeEntry(failed, clock), clock)
    assert clock.now_s == 1000.0


def test_a_local_source_is_asked_every_time_and_its_answer_awaited() -> None:
    clock = FakeClock()
    fresh = question((HostSlots("c", 3),), refresh_s=0, stale_s=0)
    assert find_answer(fresh, FakeEntry(known(age_s=0.5), clock), clock) == ("c:3\n", "")


def test_without_stale_time_nothing_stands_in_for_an_answer() -> None:
    clock = FakeClock()
    with pytest.raises(DiscoveryError, match=r"^gone$"):
        find_answer(question(DiscoveryError("gone"), refresh_s=0, stale_s=0), FakeEntry(known(age_s=0.5), clock), clock)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (DiscoveryError("one\n  two"), "one two"),
        ((HostSlots("a", 1), HostSlots("a", 2)), "listed more than once"),
        (ZeroDivisionError("oops"), "please report: ZeroDivisionError: oops"),
        (DiscoveryError("x" * 5000), "x" * FAILURE_CHARACTERS + " ..."),
    ],
)
def test_a_bad_answer_keeps_the_last_good_one(answer: tuple[HostSlots, ...] | Exception, failure: str) -> None:
    clock = FakeClock()
    entry = FakeEntry(known(age_s=20), clock)
    ask(question(answer), entry, clock)
    assert entry.record.answer == ANSWER
    assert entry.record.failure.endswith(failure) or failure in entry.record.failure
    assert "\n" not in entry.record.failure


def test_no_hosts_count_only_twice_in_a_row() -> None:
    clock = FakeClock()
    entry = FakeEntry(known(age_s=20), clock)
    several = question((), (HostSlots("a", 1),), (), DiscoveryError("throttled"), (), ())
    kept = []
    for _ in range(6):
        ask(several, entry, clock)
        kept.append(bool(entry.record.answer))
        clock.sleep(10)
    assert kept == [True, True, True, True, True, False]
    with pytest.raises(DiscoveryError, match="there are no hosts"):
        find_answer(several, entry, FakeClock(clock.now_s - 1))


def test_a_silence_begins_a_new_series() -> None:
    record = Record().asked(1000.0, gap_s=60)
    assert record.began_s == 1000.0
    assert record.asked(1059.0, gap_s=60).began_s == 1000.0
    assert record.asked(1060.0, gap_s=60).began_s == 1060.0


times = st.floats(allow_nan=False)
texts = st.text(st.characters(codec="ascii", exclude_categories=["Cc"])).map(lambda text: " ".join(text.split()))
records = st.builds(
    Record,
    began_s=times,
    asked_s=times,
    answered_s=times,
    failed_s=times,
    failure=texts,
    empty_answers=st.integers(0, 2),
    answer=st.sampled_from(["", ANSWER]),
)


@given(records)
def test_a_record_survives_being_written(record: Record) -> None:
    assert Record.from_text(record.to_text(10, "boot"), "boot") == record


@given(records, st.data())
def test_a_record_that_was_cut_short_or_is_of_another_boot_is_empty(record: Record, data: st.DataObject) -> None:
    text = record.to_text(10, "boot")
    assert Record.from_text(text, "another") == Record()
    if record.answer:
        cut = data.draw(st.integers(0, len(text) - 1))
        assert Record.from_text(text[:cut], "boot") == Record()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    (tmp_path / "file").write_text("")
    for name in ("open", "link", "file"):
        with pytest.raises(DiscoveryError, match="EDL_HVD_DISCOVERY_CACHE"):
            CacheEntry(str(tmp_path / name / "key"))
