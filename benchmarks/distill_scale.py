"""Many students and teachers in virtual time: who gives tasks to whom, beside other ways to do that.

    python benchmarks/distill_scale.py                         all scenes: about five minutes
    python benchmarks/distill_scale.py --scenes "8 students, 40 teachers" --picture scale.png
    python benchmarks/distill_scale.py --histories 100000      faults drawn at random, a quarter of an hour

The column "pull" is decided by the very code that runs in students and teachers: ``turn``, ``Window`` and ``Sharing``.
Students wait for each other after each micro-batch, messages take 0.1 to 3 ms, answers vary by a fifth. The others get
the same students, teachers and memory for micro-batches: EDL's split gives each student N teachers of its own, with one
task in flight at each and 2 N + 2 read; round robin and two choices send a task to a teacher when it is read, the
latter to the shorter of two queues, which all students know at once. Numbers are parts of the speed of students that
need no teacher.

A history has one to three students of one or two jobs, up to seven teachers that die, stop, decline, leave and come
back, and passes that end in the middle. After each turn it is checked what is so in every window, and at the end that
each micro-batch was consumed once and in order.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "tests" / "support")]
from distill_stage import SAMPLES, Stage, Student, Teacher, play_at_random

from edl_hvd.distill import window_events as events
from edl_hvd.distill.sharing import asks_ahead

STEP_S = 0.1
ROUND_TRIP_S = 0.003
WARM = 0.3
# Share of the steps that is not measured.


@dataclass(frozen=True)
class Scene:
    """Students and teachers.

    Attributes:
        students, teachers: Number of each.
        load: Part of the teachers' time that the students need.
        speeds: Relative speeds; teachers take turns.
        slow_share: Share of answers that take ten times as long.
        micro_batches: Number of them per student.
        memory: Micro-batches that fit into a student's memory; 0 for half as many again as it consumes during the
            slowest answer, and 8.
    """

    students: int
    teachers: int
    load: float
    speeds: tuple[float, ...] = (1.0,)
    slow_share: float = 0.0
    micro_batches: int = 300
    memory: int = 0

    def answer_times_s(self) -> list[float]:
        """The time of each teacher's answer."""
        speeds = [speed for _, speed in zip(range(self.teachers), itertools.cycle(self.speeds), strict=False)]
        # Slow answers are part of the load.
        unit = self.students / STEP_S / self.load / sum(speeds) * (1 + 9 * self.slow_share)
        return [1 / (speed * unit) for speed in speeds]

    @property
    def window(self) -> int:
        """Micro-batches that fit into a student's memory."""
        return self.memory or math.ceil(1.5 * max(self.answer_times_s()) / STEP_S) + 8


MIXED = (1.0, 2.0, 5.0)
SCENES: dict[str, Scene] = {
    "2 students, 8 teachers, load 0.8": Scene(2, 8, 0.8),
    "3 students, 5 teachers, load 0.9": Scene(3, 5, 0.9),
    "8 students, 40 teachers": Scene(8, 40, 0.9, MIXED),
    "32 students, 256 teachers": Scene(32, 256, 0.9, MIXED),
    "32 students, 1,000 teachers": Scene(32, 1000, 0.9, MIXED, micro_batches=250),
    "32 students, 256 teachers, 1 % of answers take 10 times as long": Scene(32, 256, 0.9, slow_share=0.01),
    "the same, with memory for 40 micro-batches": Scene(32, 256, 0.9, slow_share=0.01, memory=40),
}


@dataclass(frozen=True)
class Played:
    """What came of a scene.

    Attributes:
        of_pure: Speed, as a part of that of students that need no teacher.
        again: Tasks given a second time, as a part of all.
    """

    of_pure: float
    again: float = 0.0


@dataclass
class World:
    """The students' barrier: when all have taken their micro-batch, all make a step."""

    stage: Stage
    size: int
    there: list[Callable[[], None]] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)

    def arrive(self, go_on: Callable[[], None]) -> None:
        """A student has its micro-batch."""
        self.there.append(go_on)
        if len(self.there) == self.size:
            self.steps_s.append(self.stage.now_s)
            waiting, self.there = self.there, []
            for act in waiting:
                self.stage.later(STEP_S, act)

    def of_pure(self) -> float:
        """Speed after the first part."""
        warm = int(len(self.steps_s) * WARM)
        return STEP_S * (len(self.steps_s) - 1 - warm) / (self.steps_s[-1] - self.steps_s[warm])


@dataclass
class StepStudent(Student):
    """A student that makes its steps together with the others; what tests check after each turn is left out."""

    world: World = field(kw_only=True)

    def check(self) -> None:
        """Nothing: it takes longer than the turns."""

    def go_on(self) -> None:
        head = self.window.head
        if not self.is_waiting or head is None or not self.window.entries[head].is_answered or self.is_over:
            return
        self.is_waiting = False
        self.consumed.append(self.places[head])
        self.handle(events.Consumed(1))
        self.fill()
        self.world.arrive(self.ask)


@dataclass
class UnevenTeacher(Teacher):
    """A teacher of which some answers take ten times as long."""

    slow_share: float = 0.0

    def compute(self) -> None:
        usual_s = self.compute_s
        if self.stage.chance.random() < self.slow_share:
            self.compute_s = 10 * usual_s
        super().compute()
        self.compute_s = usual_s


def pull(scene: Scene, seed: int) -> Played:
    """With the code of this library."""
    stage = Stage(random.Random(seed))
    world = World(stage, scene.students)
    students: dict[str, Student] = {
        name: StepStudent(stage, name, "job", scene.micro_batches, STEP_S, scene.window, 1, world=world)
        for name in (f"student-{number}" for number in range(scene.students))
    }
    for number, answer_s in enumerate(scene.answer_times_s()):
        UnevenTeacher(
            stage, f"teacher-{number}", str(number), answer_s, SAMPLES, students,
            asks_ahead=asks_ahead(answer_s, ROUND_TRIP_S), slow_share=scene.slow_share,
        ).introduce()  # fmt: skip
    for student in students.values():
        student.start()
    stage.run(1e6, lambda: all(student.is_over for student in students.values()))
    for student in students.values():
        assert student.consumed == list(range(scene.micro_batches)), "each once, in order"
    windows = [student.window for student in students.values()]
    again = sum(window.again for window in windows) / sum(window.given for window in windows)
    return Played(world.of_pure(), again)


def otherwise(scene: Scene, seed: int, policy: str) -> Played:
    """With another policy."""
    stage = Stage(random.Random(seed))
    chance = stage.chance
    world = World(stage, scene.students)
    times_s = scene.answer_times_s()
    queues: list[deque[tuple[int, int]]] = [deque() for _ in times_s]
    busy = [False] * len(times_s)
    read, taken = [0] * scene.students, [0] * scene.students
    answered: list[set[int]] = [set() for _ in range(scene.students)]
    waits = [False] * scene.students
    turns = itertools.count()
    # EDL: a student has floor(teachers / students) of its own; with fewer teachers than students, some share one.
    own = max(1, scene.teachers // scene.students)
    # Its reader has 2 N + 2 tasks under way with N teachers, so memory for more is of no use to it.
    window = min(scene.window, 2 * own + 2) if policy == "EDL's split" else scene.window
    kept: list[deque[tuple[int, int]]] = [deque() for _ in range(scene.students)]

    def owners(teacher: int) -> list[int]:
        if scene.teachers >= scene.students:
            return [teacher // own] if teacher // own < scene.students else []
        return [one for one in range(scene.students) if one % scene.teachers == teacher]

    def serve(teacher: int) -> None:
        if busy[teacher]:
            return
        if policy == "EDL's split":
            mine = max((kept[one] for one in owners(teacher)), key=len, default=deque())
        else:
            mine = queues[teacher]
        if not mine:
            return
        task = mine.popleft()
        busy[teacher] = True
        slow = 10 if chance.random() < scene.slow_share else 1
        took_s = times_s[teacher] * chance.uniform(0.8, 1.2) * slow + chance.uniform(0.0002, 0.006)
        stage.later(took_s, lambda: finish(teacher, task))

    def finish(teacher: int, task: tuple[int, int]) -> None:
        busy[teacher] = False
        student, number = task
        answered[student].add(number)
        consume(student)
        serve(teacher)

    def send(student: int) -> None:
        while read[student] < min(scene.micro_batches, taken[student] + window):
            task = (student, read[student])
            read[student] += 1
            if policy == "EDL's split":
                kept[student].append(task)
                for teacher in range(scene.teachers):
                    if student in owners(teacher):
                        serve(teacher)
                continue
            if policy == "round robin":
                teacher = next(turns) % scene.teachers
            else:
                pair = chance.sample(range(scene.teachers), 2)
                teacher = min(pair, key=lambda one: len(queues[one]) + busy[one])
            queues[teacher].append(task)
            serve(teacher)

    def consume(student: int) -> None:
        if not waits[student] or taken[student] not in answered[student]:
            return
        waits[student] = False
        answered[student].discard(taken[student])
        taken[student] += 1
        send(student)
        world.arrive(lambda: ask(student))

    def ask(student: int) -> None:
        if taken[student] < scene.micro_batches:
            waits[student] = True
            consume(student)

    for student in range(scene.students):
        send(student)
        ask(student)
    stage.run(1e6, lambda: min(taken) == scene.micro_batches)
    return Played(world.of_pure())


OTHERS = ("EDL's split", "round robin", "two choices")


def draw(results: dict[str, dict[str, list[Played]]], path: Path) -> None:
    """Write the picture as a PNG file: a group of bars for each scene."""
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.9 * len(results)), layout="constrained")
    for place, (policy, colour) in enumerate(
        zip(("pull", *OTHERS), ("#12b886", "#4c6ef5", "#9aa5b1", "#f76707"), strict=True)
    ):
        rows = [row + 0.2 * place for row in range(len(results))]
        values = [median([one.of_pure for one in found[policy]]) for found in results.values()]
        axes.bar_label(axes.barh(rows, values, height=0.19, color=colour, label=policy), fmt="%.2f", padding=2)
    axes.set_yticks([row + 0.3 for row in range(len(results))], [name.replace(", 1 %", ",\n1 %") for name in results])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.08), xlabel="part of the speed of students that need no teacher")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def median(values: Sequence[float]) -> float:
    """The middle one of an odd number of values."""
    return heapq.nsmallest(len(values) // 2 + 1, values)[-1]


def main() -> None:
    """Play the scenes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--seeds", type=int, default=1, help="plays of each scene; the table has their medians")
    parser.add_argument("--picture", type=Path, help="file for a picture")
    parser.add_argument("--histories", type=int, help="number of random histories to play instead")
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    arguments = parser.parse_args()
    if arguments.histories is not None:
        turns = sum(play_at_random(arguments.first + number) for number in range(arguments.histories))
        print(f"{arguments.histories:,} histories with {turns:,} turns: each micro-batch once, in order")
        return
    results: dict[str, dict[str, list[Played]]] = {}
    print(f"| | pull | {' | '.join(OTHERS)} | window | given again | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.scenes:
        began_s, scene = time.process_time(), SCENES[name]
        pulled = [pull(scene, seed) for seed in range(arguments.seeds)]
        cpu_s = time.process_time() - began_s
        found = {"pull": pulled}
        for policy in OTHERS:
            found[policy] = [otherwise(scene, seed, policy) for seed in range(arguments.seeds)]
        results[name] = found
        numbers = " | ".join(f"{median([one.of_pure for one in plays]):.3f}" for plays in found.values())
        again = median([one.again for one in pulled])
        print(f"| {name} | {numbers} | {scene.window} | {again:.1%} | {cpu_s / arguments.seeds:.0f} s |", flush=True)
    if arguments.picture is not None:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
