"""Every micro-batch is consumed once and in order, whatever happens to teachers; in virtual time."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from distill_stage import play_at_random

from edl_hvd.distill import window_events as events
from edl_hvd.distill.place import Place
from edl_hvd.distill.sharing import Sharing, asks_ahead
from edl_hvd.distill.turns import turn
from edl_hvd.distill.window import Window

HISTORIES = 1000
# `python benchmarks/distill_scale.py --histories 100000` plays more.


def read(number: int, size_bytes: int = 1, is_answered: bool = False) -> events.Read:
    return events.Read(Place(0, 0, number, 1), size_bytes, is_answered)


def play(*window_events: events.WindowEvent | float, limit_bytes: int = 100) -> tuple[Window, list[events.Action]]:
    """A window after these window_events; a number is the moment of those after it. The actions of the last one."""
    window, now_s = Window(limit_bytes), 0.0
    actions: tuple[events.Action, ...] = ()
    for event in window_events:
        if isinstance(event, float):
            now_s = event
        else:
            result = turn(window, event, now_s)
            window, actions = result.window, result.actions
    return window, list(actions)


def gives(actions: list[events.Action]) -> list[tuple[str, int]]:
    return [(action.teacher, action.number) for action in actions if isinstance(action, events.GiveTask)]


def test_a_teacher_that_asks_gets_the_oldest_task():
    _, actions = play(
        events.TeacherReady("a", "1"),
        events.TeacherReady("b", "2"),
        read(0),
        read(1),
        events.Wanted("a"),
        events.Wanted("b"),
    )
    assert gives(actions) == [("b", 1)]


def test_the_task_of_a_lost_teacher_goes_out_first_again():
    _, actions = play(
        events.TeacherReady("a", "1"),
        events.TeacherReady("b", "2"),
        read(0),
        read(1),
        events.Wanted("a"),
        events.Left("a"),
        events.Wanted("b"),
    )
    assert gives(actions) == [("b", 0)]


def test_a_teacher_that_finds_nothing_is_told_when_there_is_something():
    _, actions = play(events.TeacherReady("a", "1"), events.Wanted("a"))
    assert actions == [events.GiveNothing("a")]
    _, actions = play(events.TeacherReady("a", "1"), events.Wanted("a"), read(0))
    assert actions == [events.Invite("a")]


def test_of_idle_teachers_the_fastest_is_told_and_only_one_for_a_task():
    window, _ = play(
        events.TeacherReady("slow", "1"),
        events.TeacherReady("fast", "2"),
        read(0),
        read(1),
        events.Wanted("slow"),
        events.Wanted("fast"),
    )
    for event, now_s in (
        (events.Answered("fast", 1), 1.0),
        (events.Answered("slow", 0), 5.0),
        (events.Wanted("slow"), 5.0),
    ):
        window = turn(window, event, now_s).window
    result = turn(window, read(2), 6.0)
    assert result.actions == (events.Invite("fast"),)
    assert turn(result.window, events.Passed(), 6.3).actions == (events.Invite("slow"),), (
        "the fast one works for another student"
    )


STORY: list[events.WindowEvent | float] = [
    events.TeacherReady("a", "1"), events.TeacherReady("b", "2"), read(0), read(1), events.Wanted("a"),
    events.Wanted("b"), 1.0, events.Answered("b", 1),
]  # fmt: skip
# Teacher "a" has had task 0 since the beginning; the median answer takes one second.


def test_the_task_that_the_consumer_waits_for_is_hedged_when_it_is_old():
    _, actions = play(*STORY, 2.0, events.Asked(), 2.9, events.Wanted("b"))
    assert actions == [events.GiveNothing("b")], "three times the median of 1 s have not passed since it was given"
    window, actions = play(*STORY, 2.0, events.Asked(), 3.0, events.Wanted("b"))
    assert gives(actions) == [("b", 0)]
    assert turn(window, events.Answered("b", 0), 4.0).actions == (events.Withdraw("a", 0), events.Accept(0))


def test_the_task_that_the_consumer_waits_for_goes_before_others():
    _, actions = play(*STORY, read(2), 2.9, events.Asked(), events.Wanted("b"))
    assert gives(actions) == [("b", 2)]
    _, actions = play(*STORY, read(2), 3.0, events.Asked(), events.Wanted("b"))
    assert gives(actions) == [("b", 0)]


def test_the_oldest_task_is_hedged_ahead_of_its_consumer_by_a_teacher_that_has_nothing_else_to_do():
    _, actions = play(*STORY, 3.0, events.Wanted("b"))
    assert gives(actions) == [("b", 0)]
    _, actions = play(*STORY, read(2), 3.0, events.Wanted("b"))
    assert gives(actions) == [("b", 2)], "other tasks go first"


def test_a_teacher_that_is_always_slow_is_not_helped_out_before_the_consumer_waits():
    story: list[events.WindowEvent | float] = [events.TeacherReady("slow", "1"), events.TeacherReady("fast", "2")]
    story += [read(0), events.Wanted("slow"), 9.0, events.Answered("slow", 0)]
    for number in range(1, 7):
        story += [read(number), events.Wanted("fast"), 9.0 + number, events.Answered("fast", number)]
    story += [read(7), 20.0, events.Wanted("slow")]
    story += [events.Asked(), events.Consumed()] * 7
    _, actions = play(*story, 24.0, events.Wanted("fast"))
    assert actions == [events.GiveNothing("fast")], "an answer of the slow one takes nine seconds"
    _, actions = play(*story, 24.0, events.Asked(), events.Wanted("fast"))
    assert gives(actions) == [("fast", 7)]


def test_only_one_task_is_hedged_ahead_of_the_consumer():
    story: list[events.WindowEvent | float] = [events.TeacherReady(name, name) for name in "abcd"]
    story += [read(number) for number in range(4)]
    story += [events.Wanted(name) for name in "abcd"]
    story += [1.0, events.Answered("c", 2), events.Answered("d", 3), 3.0]
    _, actions = play(*story, events.Wanted("c"), events.Wanted("d"))
    assert actions == [events.GiveNothing("d")]


def test_an_idle_teacher_is_called_for_a_hedge():
    window, _ = play(
        events.TeacherReady("a", "1"), events.TeacherReady("b", "2"), read(0), events.Wanted("a"), events.Wanted("b"),
        events.Asked(), 1.0,
    )  # fmt: skip
    assert window.due_s(1.0) == 6.0, "nothing is known of answers, so it is three times two seconds"
    assert turn(window, events.Passed(), 6.0).actions == (events.Invite("b"),)


def test_a_teacher_that_others_help_out_three_times_is_set_aside_and_comes_back():
    window, _ = play(events.TeacherReady("slow", "1"), events.TeacherReady("b", "2"), limit_bytes=1000)
    now_s = 0.0

    def go(event: events.WindowEvent) -> list[events.Action]:
        nonlocal window
        result = turn(window, event, now_s)
        window = result.window
        return list(result.actions)

    for number in range(3):
        go(read(number))
        go(events.Wanted("slow"))
        go(events.Asked())
        now_s += 20.0
        assert gives(go(events.Wanted("b"))) == [("b", number)]
        go(events.Answered("b", number))
        go(events.Consumed())
    assert window.teachers["slow"].aside_until_s == now_s + 10.0
    go(read(3))
    assert go(events.Wanted("slow")) == [events.GiveNothing("slow")]
    now_s += 10.0
    assert gives(go(events.Wanted("slow"))) == [("slow", 3)]


def test_late_answers_and_those_of_an_earlier_pass_do_not_count():
    window, _ = play(events.TeacherReady("a", "1"), read(0), events.Wanted("a"), events.Closed(is_final=True))
    assert turn(window, events.Answered("a", 0), 0.0).actions == ()
    window, actions = play(
        events.TeacherReady("a", "1"), read(0), events.Wanted("a"), events.Answered("a", 0), events.Answered("a", 0)
    )
    assert actions == []


def test_what_a_teacher_computes_at_the_end_of_a_pass_is_taken_over_by_the_next():
    story: list[events.WindowEvent | float] = [
        events.TeacherReady("a", "1"),
        read(0),
        read(1),
        read(2),
        events.Wanted("a"),
        events.Closed(),
    ]
    window, actions = play(*story)
    assert actions == [], "it goes on"
    assert not window.entries
    window, actions = play(*story, read(0), events.Asked(), events.Answered("a", 0))
    assert actions == [events.Accept(0)]
    assert window.head == 0
    assert window.given == 1
    window, actions = play(*story, events.Answered("a", 0), read(0))
    assert window.lead == 1, "it was answered between the passes"


def test_a_task_of_an_earlier_pass_with_another_input_at_its_place_is_asked_anew():
    def drawn(check: int) -> events.Read:
        return events.Read(Place(0, 0, 0, 1), 1, checks=(check,))

    story: list[events.WindowEvent | float] = [events.TeacherReady("a", "1"), drawn(1), events.Wanted("a")]
    window, actions = play(*story, events.Closed(), drawn(2))
    assert actions == [events.Withdraw("a", 0), events.Drop(0), events.Invite("a")]
    assert list(window.entries) == [1]
    assert not window.left
    story += [events.Answered("a", 0, 4)]
    for ends in ([events.Closed()], [events.Asked(), events.Consumed(4), events.Closed()]):
        window, actions = play(*story, *ends, drawn(2), limit_bytes=160)
        assert events.Drop(0) in actions
        assert window.lead == 0
        window, _ = play(*story, *ends, drawn(1), limit_bytes=160)
        assert window.lead == 1, "the same input"


def test_what_the_next_pass_does_not_read_again_is_withdrawn():
    story: list[events.WindowEvent | float] = [
        events.TeacherReady("a", "1"),
        read(0),
        read(1),
        events.Wanted("a"),
        events.Closed(),
    ]
    window, actions = play(*story, read(2))
    assert actions == [events.Withdraw("a", 0), events.Drop(0)]
    assert not window.left
    window, actions = play(*story, events.Read(Place(0, 1, 0, 1), 1))
    assert actions == [events.Withdraw("a", 0), events.Drop(0)], "another epoch"
    window, actions = play(*story, events.Read(Place(0, 0, 0, 2), 1))
    assert actions == [events.Withdraw("a", 0), events.Drop(0)], "it is cut in another way"
    window, actions = play(*story, events.Closed(is_final=True))
    assert actions == [events.Withdraw("a", 0), events.Drop(0)]


def test_answers_that_were_consumed_serve_a_world_that_rolls_back():
    story: list[events.WindowEvent | float] = [events.TeacherReady("a", "1")]
    for number in range(4):
        story += [read(number), events.Wanted("a"), events.Answered("a", number), events.Asked(), events.Consumed(4)]
    window, _ = play(*story, limit_bytes=160)
    assert list(window.past) == [2, 3], "those of a sixteenth of the window"
    window, actions = play(*story, events.Closed(), read(2), limit_bytes=160)
    assert window.lead == 1
    window, actions = play(*story, events.Closed(), read(3), limit_bytes=160)
    assert events.Drop(2) in actions


def test_an_answer_that_the_next_pass_has_read_past_serves_the_one_after():
    """A world that breaks soon goes back to before what it had read ahead, and may deal its places anew."""
    story: list[events.WindowEvent | float] = [events.TeacherReady("a", "1"), read(0), read(1), read(2)]
    for number in (0, 1):
        story += [events.Wanted("a"), events.Answered("a", number, 4)]
    story += [events.Wanted("a"), events.Closed(), read(3)]
    window, actions = play(*story, limit_bytes=160)
    assert actions == [events.Withdraw("a", 2), events.Drop(2), events.Invite("a")], "its answer is not there yet"
    assert list(window.past) == [0, 1]
    window, _ = play(*story, events.Closed(), read(1), limit_bytes=160)
    assert window.lead == 1
    window, actions = play(*story, limit_bytes=64)
    assert list(window.past) == [1], "those of a sixteenth of the window"
    assert events.Drop(0) in actions


def test_a_teacher_lost_between_the_passes_leaves_nothing_to_take_over():
    story: list[events.WindowEvent | float] = [
        events.TeacherReady("a", "1"),
        read(0),
        events.Wanted("a"),
        events.Closed(),
        events.Left("a"),
    ]
    _, actions = play(*story)
    assert actions == [events.Drop(0)]
    _, actions = play(*story, read(0), events.TeacherReady("b", "2"), events.Wanted("b"))
    assert gives(actions) == [("b", 1)]


def test_a_task_whose_answer_is_known_is_given_to_nobody():
    window, actions = play(events.TeacherReady("a", "1"), read(0, is_answered=True), events.Wanted("a"))
    assert actions == [events.GiveNothing("a")]
    assert window.lead == 1


def test_a_task_that_three_teachers_are_lost_with_is_poisonous():
    story: list[events.WindowEvent | float] = [read(0)]
    for process in ("1", "2", "3"):
        story += [events.TeacherReady("a", process), events.Wanted("a"), events.Left("a")]
    _, actions = play(*story[:-1])
    assert not any(isinstance(action, events.Poisoned) for action in actions)
    _, actions = play(*story)
    assert [action.number for action in actions if isinstance(action, events.Poisoned)] == [0]


def test_teachers_that_leave_kindly_or_are_lost_with_others_make_no_poison():
    story: list[events.WindowEvent | float] = [read(0)]
    for process in range(9):
        story += [events.TeacherReady("a", str(process)), events.Wanted("a"), events.Left("a", kindly=True)]
        _, actions = play(*story)
        assert not any(isinstance(action, events.Poisoned) for action in actions)
    window = replace(Window(100), given=100, lost=16)
    for process in range(7):
        first: list[events.WindowEvent] = [read(0)] if not process else []
        for event in (*first, events.TeacherReady("a", str(process)), events.Wanted("a"), events.Left("a")):
            result = turn(window, event, 0.0)
            window = result.window
        assert not any(isinstance(action, events.Poisoned) for action in result.actions), "16 % are lost anyway"


def test_a_declined_task_goes_to_another_teacher_and_is_poison_after_the_third():
    story: list[events.WindowEvent | float] = [
        events.TeacherReady("a", "1"),
        events.TeacherReady("b", "2"),
        read(0),
        events.Wanted("a"),
        events.Declined("a", 0, "NaN"),
    ]
    _, actions = play(*story, events.Wanted("a"))
    assert actions == [events.GiveNothing("a")]
    _, actions = play(*story, events.Wanted("b"))
    assert gives(actions) == [("b", 0)]
    both = [*story, events.Wanted("b"), events.Declined("b", 0, "NaN")]
    _, actions = play(*both, 1.9, events.Wanted("a"))
    assert actions == [events.GiveNothing("a")], "another teacher may be about to join"
    _, actions = play(*both, 1.9, events.Wanted("a"), 2.0, events.Passed())
    assert actions == [events.Invite("a")]
    _, actions = play(*both, 2.0, events.Wanted("a"), events.Declined("a", 0, "NaN"))
    assert [action.reasons for action in actions if isinstance(action, events.Poisoned)] == [
        ("1: NaN", "2: NaN", "1: NaN")
    ]


def test_one_teacher_that_fails_alone_is_no_proof_against_an_input_before_the_sixth_time():
    """The others may be about to join; a fleet of one ends all the same."""
    story: list[events.WindowEvent | float] = [events.TeacherReady("a", "1"), read(0)]
    for number in range(6):
        _, actions = play(*story)
        assert not any(isinstance(action, events.Poisoned) for action in actions), f"after {number} failures"
        story += [events.Wanted("a"), events.Declined("a", 0, "NaN"), 2.0 + 30.0 * (number + 1)]
    _, actions = play(*story)
    assert sum(isinstance(action, events.Poisoned) for action in actions) == 1
    twice = story[: 2 + 3 * 3]
    _, actions = play(*twice, events.TeacherReady("b", "2"), events.Wanted("b"), events.Declined("b", 0, "NaN"))
    assert any(isinstance(action, events.Poisoned) for action in actions), "a second teacher says the same"


def test_the_window_is_bounded_in_bytes_but_holds_two():
    window, _ = play(read(0, 60), limit_bytes=100)
    assert window.has_room
    window, _ = play(read(0, 60), read(1, 60), limit_bytes=100)
    assert not window.has_room
    window, _ = play(read(0, 40), read(1, 20), limit_bytes=100)
    assert window.has_room, "one as large as the largest still fits"


def test_the_window_holds_as_many_tasks_as_a_slow_answer_and_a_hedge_take():
    window, _ = play(events.TeacherReady("a", "1"), limit_bytes=10**6)
    assert window.most_tasks == 10, "nothing is known, and there is one teacher"
    now_s = 0.0
    for number in range(9):
        for event, after_s in (
            (read(number), 0.0), (events.Wanted("a"), 0.0), (events.Answered("a", number), 1.0 + number / 10),
            (events.Asked(), 0.5), (events.Consumed(), 0.0),
        ):  # fmt: skip
            now_s += after_s
            window = turn(window, event, now_s).window
    assert window.most_tasks == math.ceil((3 * 1.4 + 1.8) / statistics.median(window.steps_s)) + 2
    fast = replace(window, steps_s=(0.0,) * 8)
    assert fast.has_room, "a consumer without steps of its own has what the memory allows"


def test_the_window_accepts_anything_in_any_state():
    chance = random.Random(5)
    window = Window(50)
    for number in range(20_000):
        teacher = chance.choice("abc")
        event = chance.choice([
            read(number), events.TeacherReady(teacher, teacher), events.Left(teacher), events.Wanted(teacher),
            events.Answered(teacher, chance.randrange(9)), events.Answered(teacher, window.head or 0),
            events.Declined(teacher, window.head or 0, ""), events.Asked(), events.Passed(),
            events.Consumed(chance.randrange(4)),
            events.Closed(chance.random() < 0.2) if chance.random() < 0.1 else events.Asked(),
        ])  # fmt: skip
        window = turn(window, event, number * 0.01).window


def test_a_teacher_asks_the_job_with_the_least_time_and_in_it_the_neediest():
    sharing = Sharing().joined("a", "large", 8).joined("b", "large", 8).joined("c", "small", 8)
    for name, lead in (("a", 9), ("b", 1), ("c", 50)):
        sharing = sharing.heard(name, tasks=5, lead=lead)
    sharing = sharing.computed("large", 2.0).computed("small", 1.0)
    assert sharing.next_student(8) == "c"
    assert sharing.computed("small", 2.0).next_student(8) == "b"
    assert Sharing().joined("a", "old", 1).computed("old", 9.0).joined("b", "new", 1).used_s == {"old": 9.0, "new": 9.0}


def test_who_is_slow_beside_the_way_does_not_ask_ahead():
    assert asks_ahead(0.005, 0.001)
    assert not asks_ahead(0.1, 0.001)
    assert not asks_ahead(0.0, 1.0)


def test_tasks_that_are_computed_by_themselves_do_not_queue_up_at_a_slow_teacher():
    alone = Sharing().joined("a", "job", 8, is_alone=True).heard("a", tasks=5, lead=0)
    assert alone.next_student(64, is_empty=True) == "a"
    assert alone.asked("a").next_student(56, is_empty=True) is None, "it is asked for one already"
    assert alone.next_student(56) is None, "one waits to be computed"
    assert alone.asked("a").next_student(56, is_ahead=True) == "a", "the way takes longer than the answer"
    both = alone.joined("b", "job", 8).heard("b", tasks=5, lead=9)
    assert both.next_student(56) == "b", "others may be computed together"


# --- random histories ---


@pytest.mark.parametrize("part", range(4))
def test_random_histories_end_with_each_place_once_and_in_order(part):
    turns = sum(play_at_random(seed) for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4))
    assert turns > HISTORIES
