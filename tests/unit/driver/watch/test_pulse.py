"""Who is stopped, who is cut off, and who is merely silent."""

from __future__ import annotations

from clocks import FakeClock

from edl_hvd.driver.watch.heartbeats import HeartbeatMonitor, SilentWorker


class Patient:
    """A process whose host answers with ``state``, or not at all while that is ``None``."""

    def __init__(self, state: str | None = "S") -> None:
        self.state = state
        self.asked = 0
        self.unanswered = []

    def ask(self, answer) -> None:
        self.asked += 1
        if self.state is None:
            self.unanswered.append(answer)
        else:
            answer(self.state)


def ward(**patients: Patient) -> tuple[FakeClock, HeartbeatMonitor]:
    """A pulse that has heard each monitored once."""
    clock = FakeClock()
    pulse = HeartbeatMonitor(clock)
    for worker, monitored in patients.items():
        pulse.begins(worker, 1, monitored.ask)
        pulse.on_heartbeat(worker, 1)
    return clock, pulse


def pass_silently(clock: FakeClock, pulse: HeartbeatMonitor, seconds: float) -> list[SilentWorker]:
    """What is found in the meantime."""
    found: list[SilentWorker] = []
    for _ in range(int(seconds / 0.05)):
        clock.sleep(0.05)
        found += pulse.lost()
    return found


def test_a_stopped_process_is_known_two_seconds_after_its_last_word():
    clock, pulse = ward(a=Patient("T"))
    assert pass_silently(clock, pulse, 2.0) == []
    found = pass_silently(clock, pulse, 0.1)
    assert found[0] == SilentWorker("a", True, "its process is stopped, and said nothing for 2 s")


def test_a_worker_that_speaks_is_never_asked_for():
    monitored = Patient("T")
    clock, pulse = ward(a=monitored)
    for _ in range(100):
        assert pass_silently(clock, pulse, 1.5) == []
        pulse.on_heartbeat("a", 1)
    assert monitored.asked == 0


def test_a_silent_process_that_runs_is_told_and_not_given_up():
    clock, pulse = ward(a=Patient("R"), b=Patient("D"))
    assert pass_silently(clock, pulse, 300) == []
    assert {worker: round(seconds) for worker, seconds in pulse.silent().items()} == {"a": 300, "b": 300}
    pulse.on_heartbeat("a", 1)
    assert list(pulse.silent()) == ["b"]


def test_a_worker_of_which_nothing_is_known_is_given_up_after_half_a_minute():
    clock, pulse = ward(a=Patient(None), b=Patient(""))
    assert pass_silently(clock, pulse, 29.9) == []
    assert pulse.silent() == {}
    found = pass_silently(clock, pulse, 0.3)
    assert SilentWorker("a", False, "it said nothing for 30 s, and its host nothing of it") in found
    assert {silent.worker for silent in found} == {"a", "b"}


def test_a_host_that_stops_answering_is_given_up_half_a_minute_after_its_last_answer():
    monitored = Patient("S")
    clock, pulse = ward(a=monitored)
    assert pass_silently(clock, pulse, 60) == []
    monitored.state = None
    assert pass_silently(clock, pulse, 29) == []
    assert pass_silently(clock, pulse, 2) != []


def test_an_answer_that_comes_late_does_not_speak_against_a_worker_that_has_spoken():
    monitored = Patient(None)
    clock, pulse = ward(a=monitored)
    assert pass_silently(clock, pulse, 2.2) == []
    pulse.on_heartbeat("a", 1)
    for answer in monitored.unanswered:
        answer("T")
    monitored.state = "S"
    assert pass_silently(clock, pulse, 10) == []


def test_a_process_that_has_just_ended_is_not_called_stopped():
    """Its exit code is on its way; until all its threads are gone that takes a moment."""
    clock, pulse = ward(a=Patient("Z"))
    assert pass_silently(clock, pulse, 20) == []
    assert pulse.silent() == {}


def test_a_worker_that_has_not_spoken_yet_may_import_for_ever():
    clock = FakeClock()
    pulse = HeartbeatMonitor(clock)
    pulse.begins("a", 1, Patient("T").ask)
    assert pass_silently(clock, pulse, 3600) == []


def test_a_driver_that_was_paused_begins_to_count_anew():
    clock, pulse = ward(a=Patient("T"), b=Patient(None))
    clock.sleep(3600)
    assert list(pulse.lost()) == []
    assert pass_silently(clock, pulse, 1.9) == []
    assert [silent.worker for silent in pass_silently(clock, pulse, 0.2)] == ["a", "a"]


def test_news_of_an_earlier_life_is_no_sign_of_life():
    clock, pulse = ward(a=Patient("T"))
    pulse.begins("a", 2, Patient("T").ask)
    pulse.on_heartbeat("a", 1)
    assert pass_silently(clock, pulse, 60) == [], "incarnation 2 has not spoken yet"
    pulse.on_heartbeat("a", 2)
    assert pass_silently(clock, pulse, 3) != []
    pulse.ends("a")
    assert pass_silently(clock, pulse, 60) == []


def test_a_host_is_asked_twice_a_second_at_most():
    monitored = Patient(None)
    clock, pulse = ward(a=monitored)
    pass_silently(clock, pulse, 12)
    assert monitored.asked <= 21
