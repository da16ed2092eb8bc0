"""Who is hung and who merely takes its time, in virtual time."""

from __future__ import annotations

import itertools

import pytest
from fake_heartbeats import FOR_EVER, FakeJob, FakePhase, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_hvd.driver.watch.standstill import WaitPlace

HANG: tuple[FakePhase, float] = ("compute", FOR_EVER)
DAY_S = 24 * 3600.0


def hangs_after(count: int, seconds: float, *hang: tuple[str, float]):
    """A training that computes ``count`` batches and then does something else."""
    return itertools.chain(steps(seconds, count), hang or (HANG,))


def once(seconds: float, *pause: tuple[str, float], after: int = 10):
    """A training that does something else once, and goes on."""
    return itertools.chain(steps(seconds, after), pause, steps(seconds))


# --- hung ---


def test_a_worker_that_does_not_move_is_named_with_what_it_does_and_how_long_that_takes():
    job = FakeJob(steps(0.1), hangs_after(20, 0.1))
    hung = job.play(100)
    assert hung is not None
    assert (hung.worker, hung.incarnation) == ("b:0", 1)
    assert hung.reason == (
        "it does not move, and the others wait for it: 30 s in compute, which takes up to 0.25 s, at step 20"
    )
    assert job.clock.now_s < 1_000 + 20 * 0.25 + 33


def test_the_bound_grows_with_the_steps_of_the_job():
    job = FakeJob(steps(8.0), hangs_after(5, 8.0))
    assert job.play(5 * 8.0 + 8.0 + 75) is None
    assert job.play(10) is not None


@pytest.mark.parametrize(("phase", "bound_s"), [("input", 120), ("commit", 120), ("compute", 30)])
def test_what_waits_for_a_disk_has_more_time(phase, bound_s):
    job = FakeJob(steps(0.25), hangs_after(20, 0.25, (phase, FOR_EVER)))
    assert job.play(20 * 0.25 + bound_s - 2) is None
    hung = job.play(5)
    assert hung is not None
    assert f" s in {phase}," in hung.reason


def test_each_of_several_hung_workers_is_found():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25), steps(0.25), hangs_after(20, 0.25))
    assert job.play(100) is not None
    assert {hung.worker for hung in job.look().hung} == {"b:0", "d:0"}


def test_nobody_is_hung_as_long_as_nobody_waits():
    job = FakeJob(hangs_after(20, 0.25), hangs_after(20, 0.25))
    assert job.play(DAY_S / 20) is None
    assert job.warnings == []


def test_an_hour_is_the_bound_of_what_nobody_can_judge_and_a_minute_the_patience():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25, ("script", FOR_EVER)))
    assert job.play(3590) is None
    assert job.warnings == ['the others have waited 60 s for b:0: phase "script" at step 20']
    assert job.play(30) is not None


def test_a_worker_that_waits_for_teachers_is_never_hung_because_it_has_a_patience_of_its_own():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25, ("teachers", FOR_EVER)))
    assert job.play(4 * 3600) is None
    assert job.warnings == ['the others have waited 60 s for b:0: phase "teachers" at step 20']


def test_a_worker_that_has_its_collective_waits_for_nobody_but_itself():
    """One is still in a collective that the others have left: it is not they who keep it waiting."""
    job = FakeJob(steps(0.25), steps(0.25))
    assert job.play(10) is None
    behind, ahead = job.workers.values()
    behind.progress.waits -= 1
    behind.progress.enter("collective")
    ahead.progress.enter("compute")
    behind.go_on = ahead.go_on = lambda: None
    assert job.play(600) is None


# --- not hung ---


@pytest.mark.parametrize("slow_s", [0.4, 20.0, 120.0])
def test_a_worker_that_is_four_times_slower_is_left_alone(slow_s):
    job = FakeJob(steps(slow_s / 4), steps(slow_s))
    assert job.play(40 * slow_s) is None


@pytest.mark.parametrize("seconds", [0.4, 5.0, 60.0])
def test_a_worker_that_becomes_four_times_slower_is_left_alone(seconds):
    job = FakeJob(steps(seconds), steps(lambda number: seconds if number < 10 else 4 * seconds))
    assert job.play(60 * seconds) is None


@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_first_batches_of_a_process_may_take_half_an_hour(after):
    job = FakeJob(steps(0.25), once(0.25, ("compute", 1800.0), after=after))
    assert job.play(2000) is None
    assert len(job.warnings) == 1


@pytest.mark.parametrize("phase", ["script", "validation", "compile", "checkpoint", "join"])
def test_validating_compiling_and_writing_may_take_half_an_hour(phase):
    job = FakeJob(steps(0.25), once(0.25, (phase, 1800.0)))
    assert job.play(2000) is None
    assert [phase in warning for warning in job.warnings] == [True]


def test_after_a_validation_the_batch_has_as_much_time_as_any_other():
    job = FakeJob(steps(0.25), once(0.25, ("validation", 300.0), ("compute", 20.0)))
    assert job.play(400) is None


def test_a_wait_that_ended_by_itself_is_no_news_the_next_time():
    validations = itertools.chain.from_iterable((*steps(0.25, 20), ("script", 100.0)) for _ in range(20))
    job = FakeJob(steps(0.25), validations)
    assert job.play(15 * 105) is None
    assert len(job.warnings) == 1


def test_what_all_do_at_once_is_measured_by_the_first_one_that_is_through():
    job = FakeJob(once(0.25, ("compute", 100.0)), once(0.25, ("compute", 125.0)))
    assert job.play(200) is None


def test_members_that_have_not_formed_the_present_world_are_not_judged():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25))
    assert job.play(20) is None
    job.workers["b:0"].silent = True  # what it said last is of the world before
    job.generation = 2
    assert job.play(600) is None


@pytest.mark.parametrize("phase", ["compute", "input"])
def test_when_most_are_late_at_once_it_is_something_that_they_share(phase):
    job = FakeJob(steps(0.25), *(once(0.25, (phase, 1800.0)) for _ in range(2)), steps(0.25))
    assert job.play(140) is not None, "half of them may well be hung"
    job = FakeJob(steps(0.25), *(once(0.25, (phase, 1800.0)) for _ in range(3)))
    assert job.play(2000) is None
    assert len(job.warnings) == 3


# --- learning ---


def test_after_a_worker_was_given_up_the_next_has_twice_the_time_for_a_day():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25))
    job.watch.gave_up(job.clock.now_s)
    job.watch.gave_up(job.clock.now_s)  # of the same hang
    assert job.play(5 + 58) is None
    assert job.play(5) is not None

    job = FakeJob(steps(0.25), hangs_after(20, 0.25))
    job.watch.gave_up(job.clock.now_s - DAY_S)
    assert job.play(5 + 33) is not None


def test_what_went_well_once_may_take_twice_as_long_the_next_time():
    job = FakeJob(steps(0.25), once(0.25, ("compute", 25.0)))
    assert job.play(40) is None
    worker = job.workers["b:0"]
    worker.progress._slowest_s = 0.25  # long forgotten
    worker._script = iter((HANG,))
    worker._until_s = job.clock.now_s
    assert job.play(45) is None
    assert job.play(15) is not None


# --- silence ---


def test_a_worker_that_holds_pythons_lock_is_judged_by_its_silence():
    job = FakeJob(steps(0.25), hangs_after(20, 0.25))
    assert job.play(8) is None
    job.workers["b:0"].silent = True
    assert job.play(59) is None
    hung = job.play(5)
    assert hung is not None
    assert hung.reason == (
        "it has said nothing for 60 s while the others wait for it at step 20, although its process runs: native code "
        "holds Python's lock"
    )


def test_a_worker_that_falls_silent_is_as_far_as_those_who_wait_for_it():
    """Its last word, from the first moment of the training, is no excuse."""
    job = FakeJob(steps(0.05), hangs_after(20, 0.05))
    assert job.play(0.25) is None
    assert job.watch._seen["b:0"].beat.steps < 3
    job.workers["b:0"].silent = True
    hung = job.play(70)
    assert hung is not None
    assert "at step 20" in hung.reason


def test_a_silence_that_ended_makes_the_next_one_less_suspicious():
    job = FakeJob(steps(0.25), steps(0.25))
    worker = job.workers["b:0"]
    assert job.play(10) is None
    worker._script = itertools.chain((("compute", 20.0),), steps(0.25, 20), (HANG,))
    worker.silent = True
    assert job.play(20) is None
    worker.silent = False
    assert job.play(12) is None
    worker.progress._slowest_s = 0.25  # long forgotten
    assert job.play(1) is None
    worker.silent = True
    assert job.play(70) is None
    assert job.play(20) is not None


def test_a_worker_whose_host_was_paused_is_not_blamed_when_it_wakes():
    """Its clock may have run on, so its phase seems to have lasted as long as the others waited."""
    job = FakeJob(steps(0.25), once(0.25, ("compute", 100.0), after=40))
    assert job.play(10 + 5) is None
    job.workers["b:0"].silent = True
    for _ in range(85 * 4):  # its host says nothing either
        job.clock.sleep(0.25)
        job._move()
        job._silent_since.clear()
        assert job.look().hung == ()
    job.workers["b:0"].silent = False
    assert job.play(20) is None


@pytest.mark.parametrize("seconds", [5.0, 600.0])
def test_after_a_pause_of_its_own_the_driver_blames_nobody(seconds):
    job = FakeJob(steps(0.25), once(0.25, ("compute", 25.0), ("compute", 25.0), after=40))
    assert job.play(15) is None
    job.pause_driver(seconds)
    assert job.look().hung == ()
    assert job.play(600) is None


# --- all at once ---


def all_waiting(*collectives: str) -> FakeJob:
    """Each worker waits for its collective, and nothing arrives any more."""
    job = FakeJob(*(steps(0.25) for _ in collectives))
    assert job.play(10) is None
    job._go_on = lambda: None
    for fake, name in zip(job.workers.values(), collectives, strict=True):
        fake.progress.enter("collective")
        fake.progress.collective = name
    return job


def test_when_all_wait_for_each_other_for_a_minute_they_stand_still_and_nobody_is_hung():
    job = all_waiting("a", "b", "b")
    assert job.play(59) is None
    assert job.look().standstill is None
    assert job.play(3) is None
    still = job.look().standstill
    assert still is not None
    waits = job.workers["a:0"].progress.waits
    assert (still.generation, still.step, still.collectives) == (1, job.workers["a:0"].progress.step, ["a", "b"])
    assert still.places == {"a:0": WaitPlace(waits, "a"), "b:0": WaitPlace(waits, "b"), "c:0": WaitPlace(waits, "b")}
    assert 60 < still.duration_s < 63
    assert job.play(600) is None
    assert job.warnings == []
    later = job.look().standstill
    assert later is not None
    assert later.is_still(still)


def test_who_gets_one_of_several_collectives_of_a_wait_does_not_stand_still():
    """The gradients of a large model over a slow network: each takes half a minute, their sum is one wait."""
    job = all_waiting("gradient 0", "gradient 0")
    for number in range(1, 20):
        assert job.play(30) is None
        assert job.look().standstill is None
        for fake in job.workers.values():
            fake.progress.collective = f"gradient {number}"


@pytest.mark.parametrize("seconds", [5.0, 600.0])
def test_a_pause_of_the_driver_does_not_count_as_a_standstill(seconds):
    job = all_waiting("a", "b")
    assert job.play(30) is None
    job.pause_driver(seconds)
    assert job.look().standstill is None
    assert job.play(25) is None
    assert job.look().standstill is None
    assert job.play(10) is None
    assert job.look().standstill is not None


def test_members_that_say_nothing_do_not_stand_still_but_are_silent():
    job = all_waiting("a", "b")
    job.workers["b:0"].silent = True
    assert job.play(50) is None
    assert job.look().standstill is None


# --- whatever happens ---

DURATIONS = st.floats(0.05, 10.0)


@st.composite
def healthy(draw):
    """A worker up to four times as slow as another, with pauses that each phase may have."""
    factor = draw(st.floats(1.0, 4.0))
    pauses = {
        draw(st.integers(0, 20)): draw(
            st.one_of(
                st.tuples(st.sampled_from(["script", "validation", "compile", "checkpoint"]), st.floats(0, 600.0)),
                st.tuples(st.just("compute"), st.floats(0, 28.0)),
                st.tuples(st.sampled_from(["input", "commit"]), st.floats(0, 115.0)),
            )
        )
        for _ in range(draw(st.integers(0, 3)))
    }
    return factor, pauses


def training(base_s: float, worker: tuple, count: int):
    factor, pauses = worker
    for number in range(count):
        if number in pauses:
            yield pauses[number]
        yield from steps(base_s * factor, 1)


@settings(max_examples=30)
@given(DURATIONS, st.lists(healthy(), min_size=2, max_size=4))
def test_a_healthy_worker_is_never_given_up(base_s, workers):
    job = FakeJob(*(training(base_s, worker, 20) for worker in workers))
    for fake in job.workers.values():
        fake.progress.steps = 10
    assert job.play(20 * 4 * base_s + sum(pause[1] for _, pauses in workers for pause in pauses.values())) is None


@settings(max_examples=30)
@given(st.floats(0.05, 3.0), st.lists(healthy(), min_size=2, max_size=4), st.integers(4, 30), st.data())
def test_a_worker_that_hangs_is_found_and_nobody_else(base_s, workers, when, data):
    hangs = data.draw(st.integers(0, len(workers) - 1))
    scripts = [training(base_s, (factor, {}), when if number == hangs else 1000)
               for number, (factor, _) in enumerate(workers)]  # fmt: skip
    scripts[hangs] = itertools.chain(scripts[hangs], (HANG,))
    job = FakeJob(*scripts)
    hung = job.play(when * 4 * base_s + 4 * base_s + 10 * (4 * base_s + 1) + 35 + when)
    assert hung is not None
    assert hung.worker == list(job.workers)[hangs]
