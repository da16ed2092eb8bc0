"""What is believed of a source's answers: no healthy host is ever removed, and what is true is believed soon."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from clocks import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import soon

from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.sources.script import Script
from edl_hvd.discovery.watch import DISTINCT_PROBLEMS, HostWatch, TrustedHosts
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots

Hosts = tuple[HostSlots, ...]

A, B, C = HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 4)
answers = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)).map(
    lambda slots: tuple(HostSlots(host, count) for host, count in slots.items())
)
history = st.lists(st.one_of(st.just("no answer"), answers), max_size=40)


def after(*heard: Hosts | str) -> TrustedHosts:
    trusted = TrustedHosts()
    for entry in heard:
        trusted, _ = trusted.failed(entry, 0.0) if isinstance(entry, str) else trusted.answered(entry, 0.0)
    return trusted


def slots_of(answer: Hosts) -> dict[str, int]:
    return {entry.host: entry.slots for entry in answer}


# --- the decision ---


def test_new_hosts_and_more_slots_count_at_once_and_come_last():
    assert after((B, A), (HostSlots("c", 1), A, B), (C, B, A)).hosts == (B, A, C)


def test_one_answer_without_a_host_or_without_any_removes_nobody():
    assert after((A, B), (A,), (A, B), (), (A, B), (B,)).hosts == (A, B)


def test_two_answers_in_a_row_without_a_host_remove_it():
    assert after((A, B), (B,), (B,)).hosts == (B,)
    assert after((A, B), (), ()).hosts == ()


def test_two_answers_with_fewer_slots_lower_them_to_the_more_of_both():
    assert after((C,), (HostSlots("c", 1),)).hosts == (C,)
    assert after((C,), (HostSlots("c", 1),), (HostSlots("c", 2),)).hosts == (HostSlots("c", 2),)


def test_the_devices_are_those_of_the_newest_answer_with_as_many_slots():
    four, two, other = HostSlots("a", 4, (0, 1, 2, 3)), HostSlots("a", 2, (0, 1)), HostSlots("a", 4, (4, 5, 6, 7))
    assert after((four,), (two,)).hosts == (four,)
    assert after((four,), (two,), (two,)).hosts == (two,)
    assert after((two,), (four,)).hosts == (four,)
    assert after((four,), (other,)).hosts == (other,)


def test_an_answer_between_which_the_source_failed_is_not_in_a_row():
    assert after((A, B), (B,), "time-out", (B,), "garbage", ()).hosts == (A, B)


def test_trouble_of_any_length_removes_nobody():
    assert after((A, B), *["no answer"] * 1000).hosts == (A, B)


@given(history)
def test_who_is_in_the_newest_answer_is_always_believed(heard):
    trusted = TrustedHosts()
    for entry in heard:
        trusted = after_one(trusted, entry)
        if not isinstance(entry, str):
            believed = slots_of(trusted.hosts)
            assert all(believed.get(host, 0) >= slots for host, slots in slots_of(entry).items())


@given(history, answers)
def test_what_is_said_twice_is_believed_to_the_letter(heard, truth):
    trusted = after(*heard, truth, truth)
    assert slots_of(trusted.hosts) == slots_of(truth)
    assert len(trusted.hosts) == len(truth)


@given(history)
def test_a_host_goes_only_after_two_good_answers_in_a_row_without_it(heard):
    trusted = TrustedHosts()
    lately: list[Hosts | str] = ["no answer", "no answer"]
    for entry in heard:
        known = slots_of(trusted.hosts)
        trusted = after_one(trusted, entry)
        lately = [lately[1], entry]
        for host, slots in known.items():
            if slots_of(trusted.hosts).get(host, 0) < slots:
                assert all(not isinstance(answer, str) and slots_of(answer).get(host, 0) < slots for answer in lately)


@given(history)
def test_known_hosts_keep_their_order(heard):
    trusted = TrustedHosts()
    for entry in heard:
        known = [host.host for host in trusted.hosts]
        trusted = after_one(trusted, entry)
        now = [host.host for host in trusted.hosts]
        assert now[: len(set(known) & set(now))] == [host for host in known if host in now]


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_no_healthy_host_is_removed_over_a_thousand_mishaps(seed):
    trusted = after((A, B, C))
    for entry in mishaps(random.Random(seed), 1000):
        trusted = after_one(trusted, entry)
        assert trusted.hosts[:3] == (A, B, C)


def after_one(trusted: TrustedHosts, entry: Hosts | str) -> TrustedHosts:
    return (trusted.failed(entry, 0.0) if isinstance(entry, str) else trusted.answered(entry, 0.0))[0]


def mishaps(chance: random.Random, count: int) -> list[Hosts | str]:
    """Errors and answers that are empty or lack hosts, each followed by the truth or an error; others come and go."""
    heard: list[Hosts | str] = []
    while len(heard) < count:
        others = tuple(HostSlots(f"other-{number}", 1) for number in range(chance.randrange(3)))
        lie: Hosts = tuple(host for host in (A, B, C) if chance.random() < 0.5)
        heard += [
            chance.choice([(), lie, (*others, *lie), (HostSlots("c", 1),), "exit code 1", "did not end within 10 s"]),
            chance.choice([(A, B, C), (C, *others, B, A), "is not understood"]),
        ]
    return heard


# --- what is told ---


def tell(*steps: tuple[float, Hosts | str]) -> list[str]:
    """What is told in the course of answers and problems, each with its moment."""
    trusted, told = TrustedHosts(), []
    for now_s, entry in steps:
        trusted, news = trusted.failed(entry, now_s) if isinstance(entry, str) else trusted.answered(entry, now_s)
        told.append(news)
    return told


def test_a_problem_is_told_once_and_its_end_once():
    told = tell((0, (A,)), (1, "no cloud"), (2, "no cloud"), (4, (A,)), (7, (A,)), (8, (A,)), (9, "no cloud"))
    assert told == ["", "no cloud", "", "", "the hosts are known again, after 6 s of trouble", "", "no cloud"]


def test_every_distinct_problem_of_one_trouble_is_told():
    assert tell((0, "x"), (1, "y"), (2, "x"), (3, "y")) == ["x", "y", "", ""]


def test_a_source_that_fails_every_other_time_is_told_once():
    assert [news for news in tell(*[(0.0, "x"), (0.0, (A,))] * 500) if news] == ["x"]


def test_ages_and_numbers_do_not_make_a_problem_a_new_one():
    told = tell((0, "pid 1234 died after 1.5 s (request 7f-0a3)"), (1, "pid 99 died after 20 s (request 9c-1d4)"))
    assert [bool(news) for news in told] == [True, False]


def test_a_source_with_endless_new_problems_is_cut_short():
    words = ["".join(letters) for letters in zip("abcdefghij" * 10, *[iter("klmnopqrst" * 20)] * 2, strict=True)]
    assert (
        len([news for news in tell(*((0.0, f"x {word} {word[::-1]}") for word in words)) if news]) <= DISTINCT_PROBLEMS
    )


# --- the watch, with real threads ---


@dataclass
class ScriptedSource(Source):
    """A source that answers what a test puts into ``script``, one entry per question; blocks while there is none."""

    script: queue.SimpleQueue[Hosts | Exception] = field(default_factory=queue.SimpleQueue)
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    at_once: int = 0

    def answer(self) -> Answer:
        self.at_once += 1
        assert self.at_once == 1, "asked by two threads at a time"
        self.asked.release()
        hosts = self.script.get()
        self.at_once -= 1
        if isinstance(hosts, Exception):
            raise hosts
        return Answer(hosts)


@dataclass
class Told:
    """What a watch has told, in order."""

    news: queue.SimpleQueue[Hosts | str] = field(default_factory=queue.SimpleQueue)

    def __call__(self, news: Hosts | str) -> None:
        self.news.put(news)

    def next(self) -> Hosts | str:
        return soon(self.news)

    def rest(self) -> list[Hosts | str]:
        return [self.news.get() for _ in range(self.news.qsize())]


@pytest.fixture
def scripted():
    made = ScriptedSource()
    yield made
    made.script.put(DiscoveryError("the test is over"))  # lets a thread that still waits end


def watching(
    source: ScriptedSource | Script, told: Told, clock: FakeClock | None = None, **settings: float
) -> HostWatch:
    watch = HostWatch(source, told, told, clock=clock or FakeClock(), **{"every_s": 0.0, **settings})
    watch.start()
    return watch


def answer_all(scripted: ScriptedSource, *heard: Hosts | Exception) -> None:
    """Hosts, and return when the watch has judged all of it: it asks again only then."""
    scripted.asked.acquire()
    for entry in heard:
        scripted.script.put(entry)
        scripted.asked.acquire()
    scripted.asked.release()


def test_a_watch_tells_changes_and_troubles_and_nothing_else(scripted):
    told, clock = Told(), FakeClock()
    watch = watching(scripted, told, clock)
    failure = DiscoveryError("no\ncloud")
    answer_all(scripted, (A,), (A,), failure, failure, (A, B), (B,), (A, B), (B,), (B,))
    watch.close()
    assert told.rest() == [(A,), "no cloud", (A, B), "the hosts are known again, after 0 s of trouble", (B,)]
    assert watch.hosts == (B,)


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        ((A, HostSlots("a", 7)), "host a is listed more than once"),
        (None, "internal error of the host source, please report: TypeError"),
        (("a", "b"), "internal error of the host source, please report: AttributeError"),
        (ZeroDivisionError("x"), "internal error of the host source, please report: ZeroDivisionError: x"),
    ],
)
def test_garbage_is_a_problem_and_removes_nobody(scripted, garbage, words):
    told = Told()
    watch = watching(scripted, told)
    answer_all(scripted, (A, B), garbage, garbage, garbage)
    watch.close()
    hosts, problem = told.rest()
    assert hosts == watch.hosts == (A, B)
    assert problem.startswith(words)


def test_a_thousand_mishaps_in_a_row_remove_nobody(scripted):
    told, seed = Told(), random.randrange(1 << 32)
    print(f"seed {seed}")
    watch = watching(scripted, told)
    heard = mishaps(random.Random(seed), 1000)
    answer_all(scripted, (A, B, C), *(DiscoveryError(entry) if isinstance(entry, str) else entry for entry in heard))
    watch.close()
    lists = [news for news in told.rest() if not isinstance(news, str)]
    assert all(hosts[:3] == (A, B, C) for hosts in lists)


def test_a_source_that_hangs_is_told_and_believed_when_it_answers(scripted):
    told = Told()
    watch = watching(scripted, told, late_s=0.0)
    assert told.next() == "the host source has not answered for 0 s; the hosts stay as they are until it does"
    answer_all(scripted, (A,))
    assert told.next() == (A,)
    watch.close()


def test_a_notice_is_told_once_and_again_when_it_was_withdrawn_in_between():
    class Cloud(Source):
        """Gives a notice of ``b`` in every second and third answer, and the last answer for ever."""

        def __init__(self) -> None:
            self.notices = iter([{}, {"b": 120.0}, {"b": 119.0}, {}])

        def answer(self) -> Answer:
            return Answer((A, B), next(self.notices, {"b": 30.0}))

    told: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
    watch = HostWatch(Cloud(), Told(), Told(), lambda *notice: told.put(notice), every_s=0.0, clock=FakeClock())
    watch.start()
    assert [soon(told), soon(told)] == [("b", 120.0), ("b", 30.0)]
    watch.close()
    assert told.empty()


def test_closing_does_not_wait_for_a_source_that_hangs(scripted):
    told = Told()
    watch = watching(scripted, told)
    scripted.asked.acquire()
    watch.close()  # returns, while the question is still open
    scripted.script.put((A,))
    assert told.rest() == []


def test_closing_does_not_wait_for_the_time_of_the_next_question(scripted):
    told = Told()
    watch = watching(scripted, told, every_s=1e6)
    scripted.script.put((A,))
    assert told.next() == (A,)
    watch.close()
    assert not any(thread.name == "edl_hvd host watch" for thread in threading.enumerate())


def test_closing_before_the_start_and_from_a_callback_is_allowed(scripted):
    HostWatch(scripted, Told(), Told()).close()
    closed = threading.Event()
    calls: list[Callable[[], None]] = []

    def close(hosts: Hosts) -> None:
        calls[0]()
        closed.set()

    watch = HostWatch(scripted, close, Told(), every_s=0.0)
    calls.append(watch.close)
    watch.start()
    scripted.script.put((A,))
    soon(closed)


def test_closing_ends_a_script_that_hangs(tmp_path):
    script = Script(f"touch {tmp_path}/running; exec sleep 1000")
    before = set(threading.enumerate())
    watch = watching(script, Told())
    [asker] = [one for one in set(threading.enumerate()) - before if one.name == "edl_hvd host source"]
    watch.close()
    soon(asker)  # whether it had begun by then or not
