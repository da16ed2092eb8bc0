"""Students and teachers in virtual time, with faults drawn at random; the windows and the sharing are the real ones.

Messages between one student and one teacher keep their order and take a random time. A teacher may die, stop for a
while, decline a task, leave, or come back as another process. Students may end a pass in the middle.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from edl_hvd.distill import window_events as events
from edl_hvd.distill.place import Place
from edl_hvd.distill.sharing import Lot, Sharing, together
from edl_hvd.distill.turns import turn
from edl_hvd.distill.window import Window

SAMPLES = 4


@dataclass
class Stage:
    """The clock, and what is to come."""

    chance: random.Random
    now_s: float = 0.0
    ahead: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)
    turns: int = 0

    def later(self, in_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.ahead, (self.now_s + in_s, next(self.order), act))

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        while self.ahead and self.ahead[0][0] <= until_s and not is_over():
            self.now_s, _, act = heapq.heappop(self.ahead)
            act()


@dataclass
class Teacher:
    """A teacher's process, as far as it decides.

    Attributes:
        compute_s: Time of a batch.
        fails: Whether it declines a task of a student; draws by itself.
        dies_of: Places that end its process.
    """

    stage: Stage
    name: str
    process: str
    compute_s: float
    max_batch: int
    students: dict[str, Student]
    dies_of: frozenset[int] = frozenset()
    declines: float = 0.0
    is_alive: bool = True
    stopped_until_s: float = 0.0
    sharing: Sharing = field(default_factory=Sharing)
    tasks: list[tuple[str, int, Lot]] = field(default_factory=list)
    computing: list[tuple[str, int, Lot]] = field(default_factory=list)
    unwanted: set[tuple[str, int]] = field(default_factory=set)
    wanted: dict[str, int] = field(default_factory=dict)
    asks_ahead: bool = False

    def introduce(self) -> None:
        for student in self.students.values():
            self.sharing = self.sharing.joined(student.name, student.job, SAMPLES)
            self.wanted[student.name] = 0
            student.lines[self.name] = self
            student.handle(events.TeacherReady(self.name, self.process))

    def ask(self) -> None:
        if not self.is_alive or (self.computing and not self.asks_ahead):
            return
        if any(lot.is_alone for _, _, lot in self.tasks + self.computing):
            return
        while True:
            waiting = sum(lot.samples for _, _, lot in self.tasks)
            room = self.max_batch - waiting - self.sharing.asked_samples
            name = self.sharing.next_student(room, not waiting)
            if name is None:
                return
            self.sharing = self.sharing.asked(name)
            self.wanted[name] += 1
            self.say(name, events.Wanted(self.name))

    def say(self, name: str, event: events.WindowEvent) -> None:
        student = self.students[name]
        student.stage.later(student.wire(self, to_student=True), lambda: student.hear(self, event))

    def hear(self, student: str, action: events.Action) -> None:
        if not self.is_alive:
            return
        if self.stopped_until_s > self.stage.now_s:
            self.stage.later(self.stopped_until_s - self.stage.now_s, lambda: self.hear(student, action))
            return
        match action:
            case events.GiveTask(_, number, is_alone, tasks, lead):
                assert self.wanted[student] > 0, "a task came that was not asked for"
                self.wanted[student] -= 1
                self.sharing = self.sharing.heard(student, tasks, lead, is_reply=True)
                self.tasks.append((student, number, Lot("", SAMPLES, is_alone)))
            case events.GiveNothing():
                assert self.wanted[student] > 0, "a reply came without a question"
                self.wanted[student] -= 1
                self.sharing = self.sharing.heard(student, 0, 0, is_reply=True)
            case events.Invite():
                window = self.students[student].window
                self.sharing = self.sharing.heard(student, max(1, window.tasks), window.lead)
            case events.Withdraw(_, number):
                self.tasks = [task for task in self.tasks if task[:2] != (student, number)]
                if any(task[:2] == (student, number) for task in self.computing):
                    self.unwanted.add((student, number))
        self.compute()
        self.ask()

    def compute(self) -> None:
        if self.computing or not self.tasks:
            return
        count = together([lot for _, _, lot in self.tasks], self.max_batch)
        self.computing, self.tasks = self.tasks[:count], self.tasks[count:]
        self.stage.later(self.compute_s * self.stage.chance.uniform(0.8, 1.2), self.finish)

    def finish(self) -> None:
        if not self.is_alive:
            return
        if self.stopped_until_s > self.stage.now_s:
            self.stage.later(self.stopped_until_s - self.stage.now_s, self.finish)
            return
        done, self.computing = self.computing, []
        places = [self.students[student].places.get(number, -1) for student, number, _ in done]
        if self.dies_of.intersection(places):
            self.die()
            return
        for student, number, _ in done:
            self.sharing = self.sharing.computed(self.students[student].job, self.compute_s / len(done))
            if (student, number) in self.unwanted:
                self.unwanted.discard((student, number))
            elif self.stage.chance.random() < self.declines:
                self.say(student, events.Declined(self.name, number, "no memory"))
            else:
                self.say(student, events.Answered(self.name, number))
        self.compute()
        self.ask()

    def die(self, kindly: bool = False) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        for student in self.students.values():
            self.stage.later(student.wire(self, to_student=True), lambda student=student: student.lose(self, kindly))


@dataclass
class Student:
    """A worker: a window, a reader that fills it, and a loop that consumes it."""

    stage: Stage
    name: str
    job: str
    total: int
    step_s: float
    limit_bytes: int
    size_bytes: int
    window: Window = field(init=False)
    lines: dict[str, Teacher] = field(default_factory=dict)
    arrives_s: dict[tuple[str, bool], float] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    read: int = 0
    consumed: list[int] = field(default_factory=list)
    begin: int = 0
    accepted: set[int] = field(default_factory=set)
    poisoned: events.Poisoned | None = None
    is_waiting: bool = False
    largest_bytes: int = 0
    wake_s: float | None = None
    passes: int = 1

    def __post_init__(self) -> None:
        self.window = Window(self.limit_bytes)

    @property
    def is_over(self) -> bool:
        return len(self.consumed) == self.total or self.poisoned is not None

    def wire(self, teacher: Teacher, to_student: bool) -> float:
        """The time of a message; none overtakes another one of the same direction."""
        key = (teacher.process, to_student)
        at_s = max(self.arrives_s.get(key, 0.0), self.stage.now_s + self.stage.chance.uniform(0.0001, 0.003))
        self.arrives_s[key] = at_s + 1e-9
        return at_s - self.stage.now_s

    def handle(self, event: events.WindowEvent) -> None:
        result = turn(self.window, event, self.stage.now_s)
        self.window = result.window
        self.stage.turns += 1
        for action in result.actions:
            match action:
                case events.Accept(number):
                    assert number not in self.accepted, "an answer was accepted twice"
                    self.accepted.add(number)
                case events.Poisoned():
                    self.poisoned = action
                case events.GiveTask() | events.GiveNothing() | events.Invite() | events.Withdraw():
                    teacher = self.lines.get(action.teacher)
                    if teacher is not None:
                        self.stage.later(
                            self.wire(teacher, to_student=False),
                            lambda teacher=teacher, action=action: teacher.hear(self.name, action),
                        )
        self.check()
        due_s = self.window.due_s(self.stage.now_s)
        if due_s is not None and (self.wake_s is None or due_s < self.wake_s or self.wake_s <= self.stage.now_s):
            self.wake_s = due_s
            self.stage.later(due_s - self.stage.now_s + 1e-6, lambda: self.handle(events.Passed()))

    def check(self) -> None:
        """What is so in every window."""
        window = self.window
        left = {one.number: one.entry for one in window.left.values()}
        assert not set(left) & set(window.entries)
        assert not set(window.past) & {*left, *window.entries}
        assert set(window.past) <= self.accepted
        assert all(entry.is_answered and not entry.holders for entry in window.past.values())
        assert window.past_bytes == sum(entry.size_bytes for entry in window.past.values())
        everything = {**left, **window.entries}
        held = {(number, name) for number, entry in everything.items() for name in entry.holders}
        assert held == {(number, name) for name, one in window.teachers.items() for number in one.holds}
        assert all(not entry.holders for entry in window.entries.values() if entry.is_answered)
        positions = [entry.place.position for entry in window.entries.values()]
        assert positions == sorted(positions)
        assert set(left) <= self.accepted | {number for number, _ in held}
        size = sum(entry.size_bytes for entry in window.entries.values())
        self.largest_bytes = max(self.largest_bytes, size)
        assert size <= window.limit_bytes or len(window.entries) <= 2

    def hear(self, teacher: Teacher, event: events.WindowEvent) -> None:
        if self.lines.get(teacher.name) is teacher:
            self.handle(event)
            self.go_on()

    def lose(self, teacher: Teacher, kindly: bool) -> None:
        if self.lines.get(teacher.name) is teacher:
            del self.lines[teacher.name]
            self.handle(events.Left(teacher.name, kindly))

    def fill(self) -> None:
        while self.read < self.total and self.window.has_room:
            event = events.Read(Place(0, 0, self.read * SAMPLES, SAMPLES), self.size_bytes)
            number = self.window.number_of(event)
            assert self.places.setdefault(number, self.read) == self.read, "an answer is taken for another place"
            self.handle(event)
            self.read += 1

    def start(self) -> None:
        self.fill()
        self.handle(events.Asked())
        self.is_waiting = True

    def go_on(self) -> None:
        head = self.window.head
        if not self.is_waiting or head is None or not self.window.entries[head].is_answered or self.is_over:
            return
        assert head in self.accepted
        self.is_waiting = False
        self.consumed.append(self.places[head])
        self.handle(events.Consumed(self.stage.chance.randint(0, 1)))
        self.fill()
        self.stage.later(self.step_s * self.stage.chance.uniform(0.5, 1.5), self.ask)

    def ask(self) -> None:
        if not self.is_over and not self.is_waiting:
            self.is_waiting = True
            head = self.window.head
            if head is None or not self.window.entries[head].is_answered:
                self.handle(events.Asked())
            self.go_on()

    def begin_anew(self) -> None:
        """The world breaks: a new pass begins where the training stands."""
        if self.is_over:
            return
        self.handle(events.Closed(is_final=self.stage.chance.random() < 0.2))
        # Steps since the last commit are rolled back.
        del self.consumed[max(0, len(self.consumed) - self.stage.chance.randint(0, 3)) :]
        self.read, self.passes = len(self.consumed), self.passes + 1
        self.fill()
        self.is_waiting = True
        self.handle(events.Asked())
        self.go_on()


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
