"""What answers from teachers elsewhere cost a training, beside the training alone and a teacher in the same process.

    python benchmarks/distill.py                       all goals, five rounds: about 25 minutes
    python benchmarks/distill.py --goals scenes --scenes service co-located --rounds 1

Students and teachers are processes of this machine that sleep instead of computing, so that they do not take the
processor from each other; every answer is compared with the right one, and the order of the samples with the sampler's.
Students wait for each other after each micro-batch, as workers do. In every round the training alone is measured
again, and the ratios are those of one round.

Goals that no scene shows follow: the cost of a megabyte (``distill_wire.py``), what a student gains
(``distill_digits.py``), the start of a teacher, and those that tests show, which are run for it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import edl_hvd
from edl_hvd import distill

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("tests/support", "examples/distill")]
from fleet import Fleet
from plain_teachers import PlainFleet, PlainLoader
from waiting import soon

ROOT = Path(__file__).parents[1]
SAMPLES, SIDE = 32, 40
# 50 KB to the teacher, as uint8; the answer has 1.3 KB.
AHEAD = 40
# Micro-batches that a student of plain teachers reads ahead.
STUDENTS = 2


class Sleeper:
    """A teacher that takes a time per micro-batch, less for fewer samples, and answers what anybody can check."""

    def __init__(self, answer_s: float, slow_share: float = 0.0) -> None:
        self.answer_s, self.slow_share = answer_s, slow_share

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        is_slow = random.random() < self.slow_share
        part = len(images) / SAMPLES  # a teacher that joins answers a probe of two samples first
        time.sleep(self.answer_s * part * (10 if is_slow else 1) * random.uniform(0.9, 1.1))
        return right(images)


def right(images: torch.Tensor) -> torch.Tensor:
    """The answer."""
    return images.flatten(1)[:, :10].float()


class Images(Dataset[Any]):
    """Images that are a function of their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [(torch.full((SIDE, SIDE), index % 251, dtype=torch.uint8), index) for index in indices]


@dataclass(frozen=True)
class Scene:
    """A fleet, and what befalls it.

    Attributes:
        answers_s: Time of an answer of each teacher.
        step_s: Time of a student's micro-batch.
        micro_batches: Number of them per student.
        local_s: Time of the teacher in the student's own process, instead of a fleet.
        kills_per_s: Teachers killed, and as many started, in a second.
        stops: Number of teachers that are stopped (SIGSTOP) at a third of the way.
        kills_at_once: Number of teachers that are killed at a third of the way.
        slow_share: Share of answers that take ten times as long.
        is_plain: Whether the teachers are those of ``plain_teachers.py``.
    """

    answers_s: tuple[float, ...] = ()
    step_s: float = 0.05
    micro_batches: int = 200
    local_s: float | None = None
    kills_per_s: int = 0
    stops: int = 0
    kills_at_once: int = 0
    slow_share: float = 0.0
    is_plain: bool = False


STEP_S = 0.05
# With it, two students ask for 40 micro-batches a second.
SCENES: dict[str, Scene] = {
    # Capacity is 1.25 times the demand.
    "service": Scene((0.16,) * 8),
    # EDL's figures: 1,828 images/s alone and 656 with the teacher on the same GPUs, so it takes 1.79 steps.
    "co-located": Scene(local_s=1.79 * STEP_S, micro_batches=80),
    "64 teachers": Scene((1.2,) * 64, micro_batches=300),
    "64 teachers, plain sockets": Scene((1.2,) * 64, micro_batches=300, is_plain=True),
    "64 teachers, 4 killed and 4 started each second": Scene((1.2,) * 64, micro_batches=400, kills_per_s=4),
    # 3 at each speed of 1 : 2 : 5; together 44.4 micro-batches a second, of which 0.9 are asked for.
    "speeds 1 : 2 : 5, load 0.9": Scene((0.54,) * 3 + (0.27,) * 3 + (0.108,) * 3, micro_batches=300),
    "8 of 16 killed at once": Scene((0.16,) * 16, kills_at_once=8),
    "1 of 12 stopped": Scene((0.16,) * 12, stops=1),
    "1 % of answers take 10 times as long": Scene((0.16,) * 8, slow_share=0.01, micro_batches=300),
}


@dataclass
class Measured:
    """What a student has measured.

    Attributes:
        seconds: Time of the micro-batches after the first tenth.
        longest_s: Longest of them.
        cpu_s: Processor time of the process for one micro-batch.
        waited_s: Time in which it waited for answers.
        again, hedged: Tasks given again, and of these hedges.
        problem: Why the run does not count.
    """

    seconds: float = 0.0
    longest_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    again: int = 0
    hedged: int = 0
    given: int = 0
    problem: str = ""
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Whereabouts:
    """Where a student finds teachers.

    Attributes:
        source: Host source of the fleet.
        port: Port of its teachers.
        paths: Sockets of plain teachers.
    """

    source: str
    port: int
    paths: list[str]


def study(scene: Scene, where: Whereabouts, number: int, together: Any, results: Any) -> None:
    """One student's process."""
    torch.set_num_threads(1)
    measured = Measured()
    length = scene.micro_batches * SAMPLES
    sampler = edl_hvd.ElasticBatchSampler(length, global_batch=SAMPLES, micro_batch=SAMPLES, seed=number)
    expected = [index for indices in sampler for index in indices]
    loader: Any = DataLoader(Images(length), batch_sampler=sampler)
    if scene.is_plain:
        loader = PlainLoader(loader, where.paths, (SAMPLES, 10), AHEAD)
    elif scene.answers_s or scene.local_s is not None:
        local = None if scene.local_s is None else lambda: Sleeper(scene.local_s or 0.0)
        teachers = distill.Teachers(
            where.source if scene.answers_s else None, port=where.port, local=local, window_mb=4
        )
        loader = distill.DistillLoader(loader, teachers, send=lambda batch: batch[0])
    seen: list[int] = []
    warm = scene.micro_batches // 10
    began_s, began_cpu_s, before_s = 0.0, 0.0, 0.0
    for count, batch in enumerate(loader):
        # The checks are made in the time of the step, and alone, too, so that they cost neither more than the other.
        step_ends_s = time.monotonic() + scene.step_s
        answer = batch[2] if len(batch) == 3 else right(batch[0])
        if not torch.equal(answer, right(batch[0])):
            measured.problem = "a wrong answer"
        seen += batch[1].tolist()
        time.sleep(max(0.0, step_ends_s - time.monotonic()))
        together.wait(300)
        now_s = time.monotonic()
        if count == warm:
            began_s, began_cpu_s = now_s, time.process_time()
        elif count > warm:
            measured.steps.append(now_s - before_s)
        before_s = now_s
    measured.seconds = before_s - began_s
    measured.cpu_s = (time.process_time() - began_cpu_s) / (scene.micro_batches - warm)
    measured.longest_s = max(measured.steps)
    if seen != expected:
        measured.problem = "samples are missing, or not in order"
    if scene.answers_s and not scene.is_plain:
        window = loader._open.service.calling.outlook().window
        measured.again, measured.hedged, measured.given = window.again, window.hedges, window.given
        loader.close()
    results.put((number, measured))


def play(scene: Scene, folder: Path) -> list[Measured]:
    """Run the students of a scene to their end."""
    context = multiprocessing.get_context("forkserver")
    fleet = Fleet(folder)
    plain = PlainFleet(
        folder, map(Sleeper, scene.answers_s if scene.is_plain else ()), (SAMPLES, SIDE, SIDE), STUDENTS,
        multiprocessing.get_context("fork"),
    )  # fmt: skip
    try:
        for answer_s in () if scene.is_plain else scene.answers_s:
            fleet.start(Sleeper(answer_s, scene.slow_share), max_batch=SAMPLES, wait=False)
        fleet.await_all()
        together, results = context.Barrier(STUDENTS), context.Queue()
        where = Whereabouts(fleet.source, fleet.port, plain.paths)
        students = [
            context.Process(target=study, args=(scene, where, number, together, results)) for number in range(STUDENTS)
        ]
        for student in students:
            student.start()
        is_over = threading.Event()
        striker = threading.Thread(target=strike, args=(scene, fleet, is_over))
        striker.start()
        measured = [results.get(timeout=300)[1] for _ in students]
        is_over.set()
        soon(striker)
        for student in students:
            soon(student)
    finally:
        plain.close()
        fleet.close()
    return measured


def strike(scene: Scene, fleet: Fleet, is_over: threading.Event) -> None:
    """What befalls the fleet meanwhile."""
    chance = random.Random(1)
    if not (scene.kills_per_s or scene.stops or scene.kills_at_once):
        return
    if is_over.wait(scene.micro_batches * scene.step_s / 3):
        return
    for number in range(scene.stops):
        fleet.signal(number, signal.SIGSTOP)
    for number in range(scene.kills_at_once):
        fleet.signal(number, signal.SIGKILL)
    while scene.kills_per_s and not is_over.wait(1 / scene.kills_per_s):
        number = chance.randrange(len(scene.answers_s))
        fleet.kill(number)
        fleet.start(Sleeper(scene.answers_s[number]), number, max_batch=SAMPLES, wait=False)


def rate(scene: Scene, measured: list[Measured]) -> float:
    """Micro-batches of one student in a second; the students step together."""
    return (scene.micro_batches - scene.micro_batches // 10 - 1) / max(one.seconds for one in measured)


@dataclass(frozen=True)
class Goal:
    """What a scene is to show.

    Attributes:
        name: What is promised.
        scene: Scene that shows it.
        least: Least value.
        elsewhere: What others report or would do.
        measure: Value of a round: from the part of the speed alone of this scene and of the co-located one, and from
            what the students of this scene have measured.
    """

    name: str
    scene: str
    least: float
    elsewhere: str
    measure: Callable[[float, float, list[Measured]], float]


def _of_alone(of_alone: float, _: float, __: list[Measured]) -> float:
    return of_alone


def _of_local(of_alone: float, local: float, _: list[Measured]) -> float:
    return of_alone / local


def _longest_allowed(_: float, __: float, students: list[Measured]) -> float:
    """The longest step that is allowed, divided by the longest that there was: twice the median and an answer."""
    usual_s = statistics.median(step for one in students for step in one.steps)
    return (2 * usual_s + 0.16) / max(one.longest_s for one in students)


def _stall_allowed(_: float, __: float, students: list[Measured]) -> float:
    """As before, with a step and three answers beside the step itself."""
    usual_s = statistics.median(step for one in students for step in one.steps)
    return (2 * usual_s + 3 * 0.16) / max(one.longest_s for one in students)


SIMULATED = "EDL's split .59 to .63, two choices .54 to .82 (simulated)"
GOALS = (
    Goal("of the speed alone, with 1.25 times the teachers needed", "service", 0.97, "EDL 0.83", _of_alone),
    Goal("times the speed of a teacher in the process", "service", 2.6, "EDL 2.31", _of_local),
    Goal("of the speed alone, 64 teachers", "64 teachers", 0.97, "", _of_alone),
    Goal("the same, 4 of them killed and 4 started each second", "64 teachers, 4 killed and 4 started each second",
         0.95, "", _of_alone),
    Goal("of the speed alone, speeds 1 : 2 : 5, nothing configured", "speeds 1 : 2 : 5, load 0.9", 0.95, SIMULATED,
         _of_alone),
    Goal("longest step when half of the teachers are killed: allowed / measured", "8 of 16 killed at once", 1.0, "",
         _longest_allowed),
    Goal("longest step when a teacher is stopped: allowed / measured", "1 of 12 stopped", 1.0, "hangs", _stall_allowed),
    Goal("of the speed alone, 1 % of answers take 10 times as long", "1 % of answers take 10 times as long", 0.85,
         ".25 to .40 without a second teacher (simulated)", _of_alone),
)  # fmt: skip


def show_goals(ratios: dict[str, list[float]], rounds: dict[str, list[list[Measured]]]) -> None:
    """The goals that the scenes of this run can show, each with the median of its rounds."""
    for goal in GOALS:
        local = ratios.get("co-located", [])
        if goal.scene not in ratios or (goal.measure is _of_local and not local):
            continue
        values = [
            goal.measure(of_alone, local[number] if local else 0.0, rounds[goal.scene][number])
            for number, of_alone in enumerate(ratios[goal.scene])
        ]
        print(f"| {goal.name} | at least {goal.least:g} | {verdict(statistics.median(values), goal.least)} "
              f"| {min(values):.2f} to {max(values):.2f} | {goal.elsewhere} |")  # fmt: skip


def show_cost(rounds: dict[str, list[list[Measured]]]) -> None:
    """The processor time of a micro-batch, less what the training and the bytes of the service cost anyway."""
    service, plain = (rounds.get(name, []) for name in ("64 teachers", "64 teachers, plain sockets"))
    more_ms = [1000 * (_cost_s(one) - _cost_s(other)) for one, other in zip(service, plain, strict=False)]
    if more_ms:
        middle = statistics.median(more_ms)
        print(f"| processor time of a micro-batch, 64 teachers, more than over plain sockets | at most 1 ms "
              f"| {middle:.2f} ms ({'kept' if middle <= 1 else 'missed'}) "
              f"| {min(more_ms):.2f} to {max(more_ms):.2f} | |")  # fmt: skip


def _cost_s(students: list[Measured]) -> float:
    return statistics.mean(one.cpu_s for one in students)


def verdict(value: float, least: float) -> str:
    """A value, and whether the goal is kept."""
    return f"{value:.2f} ({'kept' if value >= least else 'missed'})"


def show_gain(seeds: int, epochs: int) -> None:
    """What the example's student gains from its teacher."""
    # Each teacher that starts imports this file, so what only one goal needs is imported here.
    from common import train_teacher
    from seeds import answers_of, learn, show

    with tempfile.TemporaryDirectory() as folder:
        answers = answers_of(train_teacher(Path(folder) / "teacher.pt"))
    gains = [learn(answers, seed, epochs) - learn(None, seed, epochs) for seed in range(seeds)]
    print(f"| points of accuracy from a teacher, digits with 200 labels, mean of {seeds} seeds | at least 4 "
          f"| {verdict(100 * statistics.mean(gains), 4)} | {show(gains)} | EDL +1.9 (ImageNet) |")  # fmt: skip


BUILD = "import torch\n\ndef build():\n    return torch.nn.Linear(64, 10)\n"


def show_wire(rounds: int) -> None:
    """What a megabyte costs on the way."""
    import distill_wire

    print("\n".join(distill_wire.goal_lines(distill_wire.measure(rounds))), flush=True)


def show_start(rounds: int) -> None:
    """How much later than its model a teacher listens."""
    later_s = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start_teacher.py"
        path.write_text(BUILD)
        load = [sys.executable, "-c", f"import runpy; runpy.run_path({str(path)!r})['build']()"]
        teach = [str(Path(sys.executable).with_name("edl-hvd")), "teach", f"{path}:build", "--devices", "cpu"]
        for _ in range(rounds):
            began_s = time.monotonic()
            subprocess.run(load, check=True)
            loaded_s, began_s = time.monotonic() - began_s, time.monotonic()
            with subprocess.Popen([*teach, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert " answers at " in process.stdout.readline()
                later_s.append(time.monotonic() - began_s - loaded_s)
                process.terminate()
    middle_s = statistics.median(later_s)
    print(f"| a teacher listens, after the time that its model takes to load | at most 1 s "
          f"| {middle_s:.2f} s ({'kept' if middle_s <= 1 else 'missed'}) "
          f"| {min(later_s):.2f} to {max(later_s):.2f} | |")  # fmt: skip


UNIT, ELASTIC = "tests/unit/distill/test_distill_", "tests/elastic/test_distill.py::test_"
SHOWN_BY_TESTS = {
    "all teachers gone and back: the first answer in time; without any, one clear error": (
        f"{UNIT}fleet.py::test_all_teachers_gone_and_back",
        f"{UNIT}refusals.py::test_no_teacher_within_patience_is_one_clear_error_and_leaves_no_thread"),
    "random histories, and real runs with faults at random: each micro-batch once, in order": (
        f"{UNIT}window.py::test_random_histories_end_with_each_place_once_and_in_order",
        f"{UNIT}faults.py::test_faults_at_random_cost_no_answer"),
    "workers 1, 3, 2, 4, 1, four of them killed, teachers too: each sample once; one SHA-256": (
        f"{ELASTIC}students_resize_and_die_while_teachers_come_and_go",
        f"{UNIT}loader.py::test_exact_answers_do_not_depend_on_the_fleet"),
    "a resize throws away a window at most; a survivor asks for no answer again": (
        f"{ELASTIC}a_resize_throws_a_window_away_at_most_and_a_survivor_asks_no_answer_again",),
    "a pass that begins where the last one ended asks nothing again": (
        f"{UNIT}loader.py::test_a_pass_that_begins_where_the_last_one_was_left_asks_nothing_again",),
    "memory: window and a tenth; a teacher three batches": (f"{UNIT}memory.py",),
    "10,000 malformed messages to either side": (
        f"{UNIT}conversation.py::test_ten_thousand_malformed_frames_take_no_memory",
        f"{UNIT}strangers.py::test_ten_thousand_malformed_messages_to_a_teacher_change_nothing",
        f"{UNIT}strangers.py::test_ten_thousand_malformed_messages_to_a_student_change_nothing"),
    "kept answers: a second job asks no teacher, nor do epochs after the last view": (
        f"{UNIT}kept.py::test_a_second_job_asks_no_teacher",
        f"{UNIT}kept.py::test_after_as_many_epochs_as_there_are_views_no_teacher_is_asked",
        f"{ELASTIC}later_jobs_learn_the_same_from_kept_answers_and_another_teacher_is_refused"),
    "text, 800 labels: 12 points from a teacher": (
        f"{UNIT}text_example.py::test_a_teacher_without_torch_is_worth_twelve_points",),
    "the command line comes without torch": (f"{UNIT}teach.py::test_the_command_line_comes_without_torch",),
}  # fmt: skip


def show_tests() -> None:
    """The goals that tests show."""
    for name, tests in SHOWN_BY_TESTS.items():
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        is_kept, last = done.returncode == 0, (done.stdout.splitlines() or ["pytest did not start"])[-1]
        print(f"| {name} | tests pass | {last} ({'kept' if is_kept else 'missed'}) | | |", flush=True)
        if not is_kept:
            print(done.stdout, done.stderr, file=sys.stderr)


KINDS = ("scenes", "wire", "digits", "start", "tests")


def main() -> None:
    """Play the scenes, and print their table and that of the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--goals", nargs="+", choices=KINDS, default=list(KINDS), help="[all]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a fifth of the micro-batches")
    arguments = parser.parse_args()
    if "scenes" not in arguments.goals:
        arguments.scenes = []
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {name: [] for name in arguments.scenes}
    rounds: dict[str, list[list[Measured]]] = {name: [] for name in arguments.scenes}
    without: list[Measured] = []
    loads = [os.getloadavg()[0]]
    for _ in range(arguments.rounds):
        alone: dict[float, float] = {}
        for name in arguments.scenes:
            scene = SCENES[name]
            if arguments.short:
                scene = Scene(**{**vars(scene), "micro_batches": scene.micro_batches // 5})
            with tempfile.TemporaryDirectory() as folder:
                if scene.step_s not in alone:
                    pure = Scene(step_s=scene.step_s, micro_batches=100)
                    measured = play(pure, Path(folder))
                    alone[scene.step_s] = rate(pure, measured)
                    without += measured
                measured = play(scene, Path(folder))
            problems = {one.problem for one in measured} - {""}
            assert not problems, problems
            ratios[name].append(rate(scene, measured) / alone[scene.step_s])
            rounds[name].append(measured)
            loads.append(os.getloadavg()[0])
            print(f"  {name}: {ratios[name][-1]:.3f} of the speed alone", file=sys.stderr, flush=True)
    if arguments.scenes:
        print("| scene | of the speed alone, median | range | longest step | again | hedged | CPU per micro-batch |")
        print("|---|---|---|---|---|---|---|")
        print(f"| none, the students alone | 1 | | {max(one.longest_s for one in without) * 1000:.0f} ms | | "
              f"| {statistics.median(one.cpu_s for one in without) * 1000:.2f} ms |")  # fmt: skip
    for name in arguments.scenes:
        found = [one for measured in rounds[name] for one in measured]
        given = max(1, sum(one.given for one in found))
        print(
            f"| {name} | {statistics.median(ratios[name]):.3f} | {min(ratios[name]):.3f} to {max(ratios[name]):.3f} "
            f"| {max(one.longest_s for one in found) * 1000:.0f} ms "
            f"| {sum(one.again for one in found) / given:.1%} | {sum(one.hedged for one in found) / given:.1%} "
            f"| {statistics.median(one.cpu_s for one in found) * 1000:.2f} ms |"
        )
    print("\n| goal | | measured, median | range | elsewhere |\n|---|---|---|---|---|", flush=True)
    show_goals(ratios, rounds)
    show_cost(rounds)
    if "wire" in arguments.goals:
        show_wire(arguments.rounds)
    if "start" in arguments.goals:
        show_start(arguments.rounds)
    if "digits" in arguments.goals:
        show_gain(seeds=10, epochs=30)
    if "tests" in arguments.goals:
        show_tests()
    loads.append(os.getloadavg()[0])
    print(f"\n{arguments.rounds} rounds; load {min(loads):.1f} to {max(loads):.1f}")


if __name__ == "__main__":
    main()
