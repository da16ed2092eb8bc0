"""Every micro-batch is consumed once and in order, whatever happens to teachers; in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from distill_stage import Stage, Student, Teacher

from edl_hvd.distill.place import Place
from edl_hvd.distill.sharing import Sharing, asks_ahead
from edl_hvd.distill.window import Window, turn
from edl_hvd.distill.window_events import (
    Accept,
    Action,
    Answered,
    Asked,
    Closed,
    Consumed,
    Declined,
    GiveNothing,
    GiveTask,
    Invite,
    Left,
    Passed,
    Poisoned,
    Read,
    TeacherReady,
    Wanted,
    WindowEvent,
    Withdraw,
)

HISTORIES = 1000
# `python tests/unit/distill/test_distill_window.py 100000` plays more.


def read(number: int, size_bytes: int = 1, is_answered: bool = False) -> Read:
    return Read(Place(0, 0, number, 1), size_bytes, is_answered)


def play(*window_events: WindowEvent | float, limit_bytes: int = 100) -> tuple[Window, list[Action]]:
    """A window after these window_events; a number is the moment of those after it. The actions of the last one."""
    window, now_s = Window(limit_bytes), 0.0
    actions: tuple[Action, ...] = ()
    for event in window_events:
        if isinstance(event, float):
            now_s = event
        else:
            result = turn(window, event, now_s)
            window, actions = result.window, result.actions
    return window, list(actions)


def gives(actions: list[Action]) -> list[tuple[str, int]]:
    return [(action.teacher, action.number) for action in actions if isinstance(action, GiveTask)]


def test_a_teacher_that_asks_gets_the_oldest_task():
    _, actions = play(TeacherReady("a", "1"), TeacherReady("b", "2"), read(0), read(1), Wanted("a"), Wanted("b"))
    assert gives(actions) == [("b", 1)]


def test_the_task_of_a_lost_teacher_goes_out_first_again():
    _, actions = play(
        TeacherReady("a", "1"), TeacherReady("b", "2"), read(0), read(1), Wanted("a"), Left("a"), Wanted("b")
    )
    assert gives(actions) == [("b", 0)]


def test_a_teacher_that_finds_nothing_is_told_when_there_is_something():
    _, actions = play(TeacherReady("a", "1"), Wanted("a"))
    assert actions == [GiveNothing("a")]
    _, actions = play(TeacherReady("a", "1"), Wanted("a"), read(0))
    assert actions == [Invite("a")]


def test_of_idle_teachers_the_fastest_is_told_and_only_one_for_a_task():
    window, _ = play(
        TeacherReady("slow", "1"), TeacherReady("fast", "2"), read(0), read(1), Wanted("slow"), Wanted("fast")
    )
    for event, now_s in ((Answered("fast", 1), 1.0), (Answered("slow", 0), 5.0), (Wanted("slow"), 5.0)):
        window = turn(window, event, now_s).window
    result = turn(window, read(2), 6.0)
    assert result.actions == (Invite("fast"),)
    assert turn(result.window, Passed(), 6.3).actions == (Invite("slow"),), "the fast one works for another student"


def test_only_the_task_that_the_consumer_waits_for_is_hedged():
    story: list[WindowEvent | float] = [
        TeacherReady("a", "1"),
        TeacherReady("b", "2"),
        read(0),
        read(1),
        Wanted("a"),
        Wanted("b"),
        1.0,
        Answered("b", 1),
    ]
    _, actions = play(*story, 60.0, Wanted("b"))
    assert actions == [GiveNothing("b")], "nobody waits"
    _, actions = play(*story, 2.0, Asked(), 4.9, Wanted("b"))
    assert actions == [GiveNothing("b")], "three times the median of 1 s have not passed"
    window, actions = play(*story, 2.0, Asked(), 5.0, Wanted("b"))
    assert gives(actions) == [("b", 0)]
    assert turn(window, Answered("b", 0), 6.0).actions == (Withdraw("a", 0), Accept(0))


def test_an_idle_teacher_is_called_for_a_hedge():
    window, _ = play(
        TeacherReady("a", "1"), TeacherReady("b", "2"), read(0), Wanted("a"), Wanted("b"), Asked(), 1.0
    )  # fmt: skip
    assert window.due_s(1.0) == 6.0, "nothing is known of answers, so it is three times two seconds"
    assert turn(window, Passed(), 6.0).actions == (Invite("b"),)


def test_a_teacher_that_others_help_out_three_times_is_set_aside_and_comes_back():
    window, _ = play(TeacherReady("slow", "1"), TeacherReady("b", "2"), limit_bytes=1000)
    now_s = 0.0

    def go(event: WindowEvent) -> list[Action]:
        nonlocal window
        result = turn(window, event, now_s)
        window = result.window
        return list(result.actions)

    for number in range(3):
        go(read(number))
        go(Wanted("slow"))
        go(Asked())
        now_s += 20.0
        assert gives(go(Wanted("b"))) == [("b", number)]
        go(Answered("b", number))
        go(Consumed())
    assert window.teachers["slow"].aside_until_s == now_s + 10.0
    go(read(3))
    assert go(Wanted("slow")) == [GiveNothing("slow")]
    now_s += 10.0
    assert gives(go(Wanted("slow"))) == [("slow", 3)]


def test_late_answers_and_those_of_an_earlier_pass_do_not_count():
    window, actions = play(TeacherReady("a", "1"), read(0), Wanted("a"), Closed())
    assert actions == [Withdraw("a", 0)]
    assert turn(window, Answered("a", 0), 0.0).actions == ()
    window, actions = play(TeacherReady("a", "1"), read(0), Wanted("a"), Answered("a", 0), Answered("a", 0))
    assert actions == []


def test_a_task_whose_answer_is_known_is_given_to_nobody():
    window, actions = play(TeacherReady("a", "1"), read(0, is_answered=True), Wanted("a"))
    assert actions == [GiveNothing("a")]
    assert window.lead == 1


def test_a_task_that_three_teachers_are_lost_with_is_poisonous():
    story: list[WindowEvent | float] = [read(0)]
    for process in ("1", "2", "3"):
        story += [TeacherReady("a", process), Wanted("a"), Left("a")]
    _, actions = play(*story[:-1])
    assert not any(isinstance(action, Poisoned) for action in actions)
    _, actions = play(*story)
    assert [action.number for action in actions if isinstance(action, Poisoned)] == [0]


def test_teachers_that_leave_kindly_or_are_lost_with_others_make_no_poison():
    story: list[WindowEvent | float] = [read(0)]
    for process in range(9):
        story += [TeacherReady("a", str(process)), Wanted("a"), Left("a", kindly=True)]
        _, actions = play(*story)
        assert not any(isinstance(action, Poisoned) for action in actions)
    window = replace(Window(100), given=100, lost=16)
    for process in range(7):
        first: list[WindowEvent] = [read(0)] if not process else []
        for event in (*first, TeacherReady("a", str(process)), Wanted("a"), Left("a")):
            result = turn(window, event, 0.0)
            window = result.window
        assert not any(isinstance(action, Poisoned) for action in result.actions), "16 % are lost anyway"


def test_a_declined_task_goes_to_another_teacher_and_is_poison_after_the_third():
    story: list[WindowEvent | float] = [
        TeacherReady("a", "1"),
        TeacherReady("b", "2"),
        read(0),
        Wanted("a"),
        Declined("a", 0, "NaN"),
    ]
    _, actions = play(*story, Wanted("a"))
    assert actions == [GiveNothing("a")]
    _, actions = play(*story, Wanted("b"))
    assert gives(actions) == [("b", 0)]
    both = [*story, Wanted("b"), Declined("b", 0, "NaN")]
    _, actions = play(*both, 1.9, Wanted("a"))
    assert actions == [GiveNothing("a")], "another teacher may be about to join"
    _, actions = play(*both, 1.9, Wanted("a"), 2.0, Passed())
    assert actions == [Invite("a")]
    _, actions = play(*both, 2.0, Wanted("a"), Declined("a", 0, "NaN"))
    assert [action.reasons for action in actions if isinstance(action, Poisoned)] == [("1: NaN", "2: NaN", "1: NaN")]


def test_the_window_is_bounded_in_bytes_but_holds_two():
    window, _ = play(read(0, 60), limit_bytes=100)
    assert window.has_room
    window, _ = play(read(0, 60), read(1, 60), limit_bytes=100)
    assert not window.has_room
    window, _ = play(read(0, 40), read(1, 20), limit_bytes=100)
    assert window.has_room, "one as large as the largest still fits"


def test_the_window_accepts_anything_in_any_state():
    chance = random.Random(5)
    window = Window(50)
    for number in range(20_000):
        teacher = chance.choice("abc")
        event = chance.choice([
            read(number), TeacherReady(teacher, teacher), Left(teacher), Wanted(teacher),
            Answered(teacher, chance.randrange(9)), Answered(teacher, window.head or 0),
            Declined(teacher, window.head or 0, ""), Asked(), Consumed(), Passed(),
            Closed() if chance.random() < 0.1 else Asked(),
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


# --- random histories ---


def play_at_random(seed: int) -> int:
    """A job with faults, to its end. Returns the number of turns of all windows."""
    chance = random.Random(seed)
    stage = Stage(chance)
    size_bytes = chance.randint(1, 10)
    students = {
        name: Student(
            stage, name, chance.choice(["job", "job", "other"]), chance.randint(3, 14), chance.choice([0.01, 0.1]),
            limit_bytes=chance.randint(1, 60), size_bytes=size_bytes,
        )
        for name in ("s", "t", "u")[: chance.randint(1, 3)]
    }  # fmt: skip
    poison = frozenset([chance.randrange(3)]) if chance.random() < 0.1 else frozenset()
    teachers: dict[str, Teacher] = {}
    names = [f"host:{number}" for number in range(chance.randint(1, 5))]
    horizon_s = chance.choice([1.0, 3.0])

    def start(name: str, is_healthy: bool = False) -> None:
        if name in teachers and teachers[name].is_alive:
            return
        teachers[name] = Teacher(
            stage, name, f"{name}/{chance.random()}", chance.choice([0.005, 0.05, 0.4]), chance.choice([4, 8, 16]),
            students, poison, 0.0 if is_healthy else chance.choice([0.0, 0.0, 0.05]), asks_ahead=chance.random() < 0.5,
        )  # fmt: skip
        teachers[name].introduce()

    def strike() -> None:
        name = chance.choice(names)
        teacher = teachers.get(name)
        match chance.randrange(6):
            case 0 if teacher is not None:
                teacher.die()
            case 1 if teacher is not None:
                teacher.die(kindly=True)
            case 2 if teacher is not None:
                teacher.stopped_until_s = stage.now_s + chance.choice([0.2, 5.0, 1000.0])
            case 3:
                chance.choice(list(students.values())).begin_anew()
            case _:
                start(name)

    for student in students.values():
        student.start()
    for _ in range(chance.randint(0, 12)):
        stage.later(chance.uniform(0.0, horizon_s), strike)
    # In the end there are teachers that live, beside those that are stopped for good.
    for moment in range(100):
        stage.later(horizon_s + moment * 0.5, lambda: start("healthy:1", is_healthy=True))
        stage.later(horizon_s + moment * 0.5, lambda: start("healthy:2", is_healthy=True))
    stage.run(5000.0, lambda: all(student.is_over for student in students.values()))
    for student in students.values():
        assert student.is_over, f"{student.name} hangs at {student.consumed} of {student.total}"
        assert student.consumed == list(range(len(student.consumed))), "each place once, in order"
        if student.poisoned is not None:
            declined = any(teacher.declines for teacher in teachers.values())
            guilty = student.places[student.poisoned.number]
            assert guilty in poison or declined or len(student.poisoned.reasons) >= 3
            assert guilty >= len(student.consumed)
    return stage.turns


@pytest.mark.parametrize("part", range(4))
def test_random_histories_end_with_each_place_once_and_in_order(part):
    turns = sum(play_at_random(seed) for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4))
    assert turns > HISTORIES


if __name__ == "__main__":
    import sys

    first, count = (int(sys.argv[2]) if len(sys.argv) > 2 else 0), int(sys.argv[1])
    print(sum(play_at_random(seed) for seed in range(first, first + count)), "turns in", count, "histories")
