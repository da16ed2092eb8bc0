"""What follows from a worker's condition: its stack is shown, it is given up, or it is spared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from clocks import FakeClock

from edl_hvd.driver.membership.events import Deadlocked, Lost
from edl_hvd.driver.membership.state import Membership, PublishedWorld, Rules, Slot, WorldPhase
from edl_hvd.driver.watch.health import Health
from edl_hvd.protocol import Beat, StragglerFound, Waits, WorkerPhase

STACK = ["Current thread 0x0b (most recent call first):", '  File "/job/train.py", line 71 in augment']
MEMBERS = ("a:0", "b:0")


class Process:
    """Says what the test says."""

    def __init__(self) -> None:
        self.state = "S"
        self.asked: list[tuple[int, bool]] = []
        self.during: Callable[[], None] = lambda: None
        self.error: Exception | None = None

    def ask_state(self, pid: int, answer: Callable[[str], None]) -> None:
        answer(self.state)

    async def stack(self, pid: int, stopped: bool = False) -> list[str]:
        self.asked.append((pid, stopped))
        self.during()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return STACK


class Ward:
    """Two workers, one of which waits for the other. Time passes in :meth:`play` only."""

    def __init__(self, phase: WorldPhase = "running") -> None:
        self.clock = FakeClock()
        self.lost: list[Lost] = []
        self.notices: list[str] = []
        self.slow: list[StragglerFound] = []
        self.deadlocked: list[Deadlocked] = []
        self.asked: list[tuple[str, int, list[str]]] = []
        self.phases: dict[str, WorkerPhase] = {"a:0": "collective", "b:0": "compute"}
        self.health = Health(
            self.clock, self.lost.append, self.notices.append, self.slow.append, self.deadlocked.append,
            lambda *question: self.asked.append(question),
        )  # fmt: skip
        self.processes = {worker: Process() for worker in MEMBERS}
        self.membership = Membership(
            Rules(2, 1, 2),
            slots={worker: Slot("member", 3) for worker in MEMBERS},
            world=PublishedWorld(1, MEMBERS, phase),
        )
        self.silent: set[str] = set()
        self.moving = False
        self.began_s = self.clock.now_s
        for worker, process in self.processes.items():
            self.health.begins(worker, 3, process)

    async def play(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.clock.sleep(0.25)
            for worker in MEMBERS:
                if worker not in self.silent:
                    self.say(worker)
            self.health.look(self.membership)
            for _ in range(5):
                await asyncio.sleep(0)

    def say(self, worker: str) -> None:
        lasted_s = 0.1 if self.moving else self.clock.now_s - self.began_s
        phase = self.phases[worker]
        self.health.heard(worker, 3)
        name = f"of {worker}" if phase == "collective" else ""
        beat = Beat(1, 77, 41, 0, -1, phase, lasted_s, 1.0, 9, 41, 41, 0.1, name)
        self.health.beat(worker, 3, beat, self.membership)


def run(test) -> None:
    asyncio.run(test())


def test_a_hung_worker_shows_its_stack_and_is_given_up_once():
    async def test() -> None:
        ward = Ward()
        await ward.play(40)
        [lost] = ward.lost
        assert (lost.worker, lost.incarnation) == ("b:0", 3)
        assert lost.reason == (
            "it does not move, and the others wait for it: 30 s in compute, which takes up to 0.1 s, at step 41; at "
            "train.py:71 in augment"
        )
        assert ward.processes["b:0"].asked == [(77, False)]

    run(test)


def test_a_fault_while_a_stack_is_looked_at_is_raised_at_the_next_look():
    async def test() -> None:
        ward = Ward()
        ward.processes["b:0"].error = ValueError("a stack that does not read")
        with pytest.raises(ValueError, match="a stack that does not read"):
            await ward.play(40)

    run(test)


def test_a_worker_that_moves_while_its_stack_is_looked_at_is_spared_and_may_be_examined_again():
    async def test() -> None:
        ward = Ward()

        def move() -> None:
            ward.moving = True
            ward.say("b:0")
            ward.health.look(ward.membership)

        ward.processes["b:0"].during = move
        await ward.play(60)
        assert ward.lost == []
        [notice] = ward.notices
        assert notice.startswith("b:0 was about to be ended (it does not move")
        assert notice.endswith("but it moves again")
        ward.moving, ward.began_s = False, ward.clock.now_s
        ward.processes["b:0"].during = lambda: None
        await ward.play(70)
        assert [lost.worker for lost in ward.lost] == ["b:0"]

    run(test)


def test_a_stopped_worker_is_given_up_after_two_seconds_and_not_woken():
    async def test() -> None:
        ward = Ward()
        await ward.play(1)
        ward.silent.add("b:0")
        ward.processes["b:0"].state = "T"
        await ward.play(2.25)
        [lost] = ward.lost
        assert lost.reason == "its process is stopped, and said nothing for 2 s; at train.py:71 in augment"
        assert ward.processes["b:0"].asked == [(77, True)]

    run(test)


def test_a_worker_whose_host_is_gone_is_not_asked_for_its_stack():
    async def test() -> None:
        ward = Ward()
        await ward.play(1)
        ward.silent.add("b:0")
        ward.processes["b:0"].state = ""
        await ward.play(31)
        assert [lost.reason for lost in ward.lost] == ["it said nothing for 30 s, and its host nothing of it"]
        assert ward.processes["b:0"].asked == []

    run(test)


def test_a_stack_that_cannot_be_had_keeps_nobody_alive():
    async def test() -> None:
        ward = Ward()
        ward.processes["b:0"].error = OSError("no more processes")
        await ward.play(40)
        [lost] = ward.lost
        assert lost.reason.endswith("at step 41")

    run(test)


def test_a_worker_that_ends_while_it_is_examined_has_ended():
    async def test() -> None:
        ward = Ward()
        ward.processes["b:0"].during = lambda: ward.health.ends("b:0")
        ward.moving = False
        await ward.play(40)
        assert ward.lost == []

    run(test)


def test_while_a_world_forms_or_is_left_its_members_are_not_judged():
    async def test() -> None:
        for phase in ("forming", "broken"):
            ward = Ward(phase)
            await ward.play(600)
            assert ward.lost == []
            assert ward.notices == []

    run(test)


def test_a_straggler_is_told_to_people_and_to_the_job():
    async def test() -> None:
        ward = Ward()
        for step in range(0, 100, 5):
            for worker, compute_s in (("a:0", 0.1), ("b:0", 0.4)):
                beat = Beat(1, 77, step, 0, -1, "compute", 0.0, compute_s * step, 2 * step, step, step, 0.4)
                ward.health.beat(worker, 3, beat, ward.membership)
        assert ward.slow == [StragglerFound("b:0", 1, 50, 0.4, 0.1)]
        assert ward.notices == ["b:0 is slow: 0.4 s for a micro-batch at step 50, 4.0 times as long as the others"]

    run(test)


# --- all at once ---


def standing_still() -> Ward:
    ward = Ward()
    ward.phases = dict.fromkeys(MEMBERS, "collective")
    return ward


def answer(ward: Ward, worker: str, started: list[int], **other: Any) -> None:
    said = Waits(1, 9, f"of {worker}", tuple(started), f"t.py:{worker[0]}", f"  File {worker}")
    ward.health.answered(worker, 3, replace(said, **other))


def test_workers_that_wait_for_what_others_have_not_started_are_deadlocked():
    async def test() -> None:
        ward = standing_still()
        await ward.play(63)
        question = (1, ["of a:0", "of b:0"])
        assert ward.asked == [("a:0", *question), ("b:0", *question)]
        answer(ward, "a:0", [1, 0])
        assert ward.deadlocked == [], "one answer tells nothing"
        answer(ward, "b:0", [0, 1])
        [deadlock] = ward.deadlocked
        assert deadlock.generation == 1
        assert deadlock.reason.startswith(
            "the workers wait for each other in different collectives, for 60 s by now (EDL_HVD_COLLECTIVE_TIMEOUT): "
            "rank 0 (a:0) in 'of a:0' at t.py:a; rank 1 (b:0) in 'of b:0' at t.py:b; every worker has to make the same "
        )
        [notice] = ward.notices
        assert notice.splitlines() == [
            "where each worker waits:",
            "rank 0 (a:0), innermost frame first:", "  File a:0",
            "rank 1 (b:0), innermost frame first:", "  File b:0",
        ]  # fmt: skip
        await ward.play(600)
        assert len(ward.asked) == 2
        assert ward.lost == []

    run(test)


def test_workers_that_wait_for_what_all_have_started_are_told_once_and_left_alone():
    """One has what the other still waits for; a broadcast may take minutes."""

    async def test() -> None:
        ward = standing_still()
        await ward.play(63)
        answer(ward, "a:0", [7, 7])
        answer(ward, "b:0", [6, 7])
        await ward.play(600)
        assert ward.deadlocked == []
        assert ward.notices == [
            "all 2 workers have waited 60 s at step 41 for a collective that all of them have started: rank 0 (a:0) in "
            "'of a:0' at t.py:a; rank 1 (b:0) in 'of b:0' at t.py:b; check the network between their hosts, and "
            "whether a host stalls"
        ]
        assert len(ward.asked) == 2

    run(test)


def test_answers_that_are_late_or_of_another_place_do_not_count_and_all_are_asked_again():
    async def test() -> None:
        ward = standing_still()
        answer(ward, "a:0", [1, 0])
        await ward.play(63)
        answer(ward, "a:0", [1, 0])
        for other in ({"generation": 2}, {"waits": 10}, {"collective": "of a:0"}):
            answer(ward, "b:0", [0, 1], **other)
        answer(ward, "b:0", [0])
        ward.health.answered("b:0", 2, Waits(1, 9, "of b:0", (0, 1), "", ""))
        assert ward.deadlocked == []
        await ward.play(5)
        assert len(ward.asked) == 4
        answer(ward, "b:0", [0, 1])
        answer(ward, "a:0", [1, 0])
        assert len(ward.deadlocked) == 1

    run(test)


def test_a_world_that_a_member_has_left_is_not_asked():
    async def test() -> None:
        ward = standing_still()
        ward.membership = replace(ward.membership, world=PublishedWorld(1, (*MEMBERS, "c:0"), "changing"),
                                  slots={**ward.membership.slots, "c:0": Slot("ready", 1)})  # fmt: skip
        await ward.play(120)
        assert ward.asked == []

    run(test)


def test_whoever_moves_before_all_have_answered_ends_the_inquiry():
    async def test() -> None:
        ward = standing_still()
        await ward.play(63)
        answer(ward, "a:0", [1, 0])
        ward.phases["b:0"], ward.moving = "compute", True
        await ward.play(1)
        answer(ward, "b:0", [0, 1])
        assert ward.deadlocked == []

    run(test)


def test_where_nobody_trains_after_a_minute_people_are_told_once_what_a_script_calls():
    async def test() -> None:
        ward = Ward()
        starting = {worker: Slot("starting", 3) for worker in MEMBERS}
        ward.membership = replace(ward.membership, slots=starting, world=PublishedWorld())
        ward.silent = set(MEMBERS)
        await ward.play(59)
        assert ward.notices == []
        await ward.play(120)
        [notice] = ward.notices
        assert notice.startswith("no worker has called its training function in the first 60 s; ")
        assert "a function decorated with @edl_hvd.elastic" in notice
        assert "own hvd.init()" in notice

    run(test)


def test_where_a_worker_waits_for_others_or_a_world_was_nobody_is_told():
    async def test() -> None:
        for slot, world in (
            (Slot("ready", 3), PublishedWorld()),
            (Slot("starting", 3), PublishedWorld(1, MEMBERS, "broken")),
        ):
            ward = Ward()
            ward.membership = replace(ward.membership, slots={"a:0": slot, "b:0": Slot("starting", 3)}, world=world)
            ward.silent = set(MEMBERS)
            await ward.play(120)
            assert ward.notices == []

    run(test)
