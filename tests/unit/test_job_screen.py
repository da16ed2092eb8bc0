"""What a person sees of a job: the bottom line, a line for each change of the world, and the report of a failure."""

from __future__ import annotations

import asyncio
import doctest
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edl_hvd.cli import failure_report, words
from edl_hvd.cli.job_screen import JobScreen
from edl_hvd.cli.live_line import LiveLine
from edl_hvd.cli.world_changes import WorldChanges
from edl_hvd.driver import status as status_module
from edl_hvd.driver.control import Beat
from edl_hvd.driver.happenings import (
    AskChange,
    DrainAsked,
    End,
    Exited,
    Formed,
    HostsFound,
    Kill,
    Publish,
    Ready,
    SetAside,
    Spawn,
)
from edl_hvd.driver.job import Job, Network
from edl_hvd.driver.membership import Membership, Rules, advance, begin
from edl_hvd.driver.reporter import Reporter
from edl_hvd.driver.status import Figures, Heard, Pace, Process, Remaining, Shortage, Status, WorkerStatus, describe
from edl_hvd.hosts import HostSlots

BEAT = Beat(1, 7, 5, 80, -1, "compute", 0.1, 3.0, 4, 5, 5, 0.1)
TRAINING = Status(
    0.0, "training", 3, 4, Figures(step=12_345, samples=1_580_160, samples_per_s=5_120.4, saved_step=12_000)
)


@pytest.mark.parametrize("module", [words, failure_report, status_module])
def test_the_examples_in_the_documentation_are_so(module):
    assert doctest.testmod(module).failed == 0


# --- a terminal ---


class Terminal:
    """A terminal of which only the screen's content is kept: text, newline, return, and erasing a line.

    Attributes:
        repaints: How often its last line was drawn.
    """

    def __init__(self, columns: int = 80) -> None:
        self.repaints = 0
        self._lines = [""]
        self._place = 0
        self._main, self._other = pty.openpty()
        tty.setraw(self._other)
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stdout = open(os.dup(self._other), "wb", buffering=0)  # noqa: SIM115  # closed below
        self.stderr = open(os.dup(self._other), "wb", buffering=0)  # noqa: SIM115
        self._read = bytearray()
        self._reading = threading.Thread(target=self._keep_reading)
        self._reading.start()

    def _keep_reading(self) -> None:
        while True:
            try:
                data = os.read(self._main, 65_536)
            except OSError:  # nobody has the other side any more
                return
            self._read += data

    def lines(self) -> list[str]:
        """What it shows and what has scrolled away, from the top; call it once, at the end."""
        self.stdout.close()
        self.stderr.close()
        os.close(self._other)
        self._reading.join()
        os.close(self._main)
        text = self._read.decode()
        for piece in re.findall(r"\x1b\[[0-9;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
            self._take(piece)
        return self._lines

    def _take(self, piece: str) -> None:
        if piece == "\x1b[2K":
            self.repaints += 1
            self._lines[-1] = ""
        elif piece == "\r":
            self._place = 0
        elif piece == "\n":
            self._lines.append("")  # raw: the column would stay, and every line here ends at the left
            self._place = 0
        elif not piece.startswith("\x1b"):
            line = self._lines[-1]
            self._lines[-1] = line[: self._place] + piece + line[self._place + len(piece) :]
            self._place += len(piece)


class Time:
    """Calls what is due when a test says that time has passed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._due.append((self.now_s + delay_s, call))

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for moment_s, call in self._due if moment_s <= self.now_s]
        self._due = [entry for entry in self._due if entry[0] > self.now_s]
        for call in due:
            call()


def live(terminal: Terminal, time: Time) -> LiveLine:
    return LiveLine(terminal.stdout, terminal.stderr, True, time.later, lambda: time.now_s)


def test_output_scrolls_undamaged_above_the_live_line():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    expected = []
    for number in range(2000):
        stream = "stderr" if number % 7 == 0 else "stdout"
        line.write(stream, f"{number} {'x' * (number % 100)}\n".encode())
        expected.append(f"{number} {'x' * (number % 100)}")
        if number % 50 == 0:
            line.show(lambda columns, number=number: f"step {number}")
            time.pass_(0.02)
    time.pass_(1.0)
    assert terminal.lines() == [*expected, "step 1950"]


def test_output_in_a_file_stays_there_while_the_terminal_has_the_line(tmp_path):
    terminal, time = Terminal(), Time()
    with open(tmp_path / "output", "wb") as file:
        line = LiveLine(file, terminal.stderr, True, time.later, lambda: time.now_s)
        line.show(lambda columns: "step 1")
        for number in range(100):
            line.write("stdout", f"out {number}\n".encode())
            line.write("stderr", f"err {number}\n".encode())
            time.pass_(0.03)
        line.flush()
    assert terminal.lines() == [*(f"err {number}" for number in range(100)), "step 1"]
    assert (tmp_path / "output").read_text() == "".join(f"out {number}\n" for number in range(100))


def test_when_it_is_closed_nothing_is_left_of_it():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    line.write("stdout", b"last words\n")
    line.close()
    line.write("stderr", b"the report\n")
    assert terminal.lines() == ["last words", "the report", ""]


def test_it_is_drawn_a_few_times_a_second_however_much_is_printed():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    for _ in range(1000):
        line.write("stdout", b"a line of a worker that prints one every millisecond\n")
        time.pass_(0.001)
    assert len(terminal.lines()) > 900
    assert terminal.repaints <= 11


def test_what_is_printed_at_once_is_not_held_in_memory():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    for _ in range(100):
        line.write("stdout", b"y" * 9_999 + b"\n")
    assert len(terminal.lines()) > 70, "although no time has passed"


def test_a_worker_that_leaves_a_colour_on_does_not_colour_the_live_line():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.write("stdout", b"\x1b[31mred\n")
    line.show(lambda columns: "step 1")
    time.pass_(1)
    assert terminal.lines() == ["red", "step 1"]
    assert b"\x1b[0mstep 1" in terminal._read


@pytest.mark.parametrize("columns", [80, 40, 20, 19])
def test_the_line_fits_the_terminal(columns, monkeypatch):
    terminal = Terminal(columns)
    screen = screen_on(terminal, monkeypatch)
    screen.status(replace(TRAINING, drains=(Remaining("node-with-a-long-name-3", 99.0),), workers=()))
    shown = terminal.lines()[-1]
    assert len(shown) < columns
    if columns == 80:
        assert shown == "● step 12,345 · 5,120 samples/s · 4 workers · checkpoint 12,000"
    assert shown.endswith("…") == (20 <= columns < 80)


def test_without_a_terminal_there_is_only_the_output():
    output, errors, time = io.BytesIO(), io.BytesIO(), Time()
    line = LiveLine(output, errors, True, time.later)
    line.show(lambda columns: "step 1")
    line.write("stdout", b"one\n")
    line.write("stderr", b"two\n")
    line.close()
    assert (output.getvalue(), errors.getvalue()) == (b"one\n", b"two\n")


def test_a_program_that_reads_the_output_may_print_to_the_same_terminal_so_there_is_no_line():
    """As ``edlrun ... | tee log`` does."""
    terminal = Terminal()
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb", buffering=0) as pipe:
        assert not LiveLine(pipe, terminal.stderr, True, Time().later).live
    with open("/dev/null", "wb") as file:
        assert LiveLine(file, terminal.stderr, True, Time().later).live
    assert terminal.lines() == [""]


# --- its words ---


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (TRAINING, "step 12,345 · 5,120 samples/s · 4 workers · checkpoint 12,000"),
        (replace(TRAINING, figures=Figures(3, samples_per_s=0.26)),
         "step 3 · 0.3 samples/s · 4 workers · no checkpoint yet"),
        (replace(TRAINING, size=1, figures=Figures(3, saved_step=2, saved_age_s=125)),
         "step 3 · 1 worker · checkpoint 2 (2:05 min ago)"),
        (replace(TRAINING, state="regrouping"), "regrouping · step 12,345 · 4 workers · checkpoint 12,000"),
        (replace(TRAINING, state="waiting", shortage=Shortage(2, 1, ("host b is set aside for 43 s",), 572.3)),
         "waiting for workers · 1 of 2 ready · gives up in 9:32 min · host b is set aside for 43 s"),
        (replace(TRAINING, state="starting", shortage=Shortage(4, 0, ("4 are starting",), None)),
         "waiting for workers · 0 of 4 ready · 4 are starting"),
    ],
)  # fmt: skip
def test_the_line_says_how_the_job_stands(status, shown):
    assert words.join(words.status_line(status)) == shown


def member(generation: int = 1, *names: str) -> Publish:
    return Publish(generation, names)


def play(changes: WorldChanges, *moments: object) -> list[str]:
    """Happenings and actions, one after the other, each after a tenth of a second."""
    told = []
    for number, moment in enumerate(moments):
        if isinstance(moment, (Exited, Formed, Ready)):
            told.append(changes.happened(moment, 0.1 * number))
        else:
            changes.done(moment, 0.1 * number)  # type: ignore[arg-type]
    return [line for line in told if line]


def world(generation: int, lives: dict[str, int], step: int = -1) -> list[object]:
    """A world comes to be."""
    started = [Spawn(worker, life) for worker, life in lives.items()]
    ready = [Ready(worker, life, step) for worker, life in lives.items()]
    formed = [Formed(worker, life, generation) for worker, life in lives.items()]
    return [*started, *ready, Publish(generation, tuple(lives)), *formed]


FOUR = {"a:0": 1, "a:1": 1, "b:0": 1, "b:1": 1}
LOST = "ssh lost the connection to host b (exit code 255): Connection reset by peer; the worker may still run"


@pytest.mark.parametrize(
    ("moments", "line"),
    [
        ([Exited("b:1", 1, False, "killed by SIGKILL"), *world(2, {"a:0": 1, "a:1": 1, "b:0": 1}, 412)],
         "b:1 lost (killed by SIGKILL) · 3 workers go on · step 412 · 1.00 s"),
        ([Exited("b:0", 1, False, LOST), Exited("b:1", 1, False, LOST), *world(2, {"a:0": 1, "a:1": 1}, 412)],
         "host b lost (Connection reset by peer) · 2 workers go on · step 412 · 0.80 s"),
        ([Exited("b:0", 1, False, "killed by SIGBUS"), Exited("b:1", 1, False, "killed by SIGBUS"),
          *world(2, {"a:0": 1, "a:1": 1}, 412)],
         "host b lost (killed by SIGBUS) · 2 workers go on · step 412 · 0.80 s"),
        ([Kill("a:0", 1, "its process is stopped"), Exited("a:0", 1, False, "killed by SIGKILL"),
          *world(2, {"b:0": 1}, 9)],
         "a:0 lost (its process is stopped) · a:1, b:1 left · 1 worker goes on · step 9 · 0.50 s"),
        ([AskChange(1), *world(2, {"a:0": 1, "a:1": 1}, 5)], "host b left · 2 workers go on · step 5 · 0.70 s"),
        ([AskChange(1), *world(2, {**FOUR, "c:0": 1, "c:1": 1}, 5)],
         "host c joined · 6 workers go on · step 5 · 2.30 s"),
        ([AskChange(1), *world(2, {**FOUR, "b:2": 1}, 5)], "b:2 joined · 5 workers go on · step 5 · 2.00 s"),
        ([Exited("a:0", 1, False, "exit code 1"), *world(2, {**FOUR, "a:0": 2}, 5)],
         "a:0 lost (exit code 1) · a:0 came back · 4 workers go on · step 5 · 1.70 s"),
        # All are new, and restore a checkpoint: nobody knows the step.
        ([Exited(worker, 1, False, "exit code 1") for worker in FOUR] + world(2, {"c:0": 1}),
         "host a, host b lost (exit code 1) · host c joined · 1 worker goes on · 0.40 s"),
    ],
)  # fmt: skip
def test_a_change_of_the_world_is_one_line_in_plain_words(moments, line):
    changes = WorldChanges()
    assert play(changes, *world(1, FOUR)) == ["training starts with 4 workers"]
    (told,) = play(changes, *moments)
    assert re.sub(r"[\d.]+ s$", "", told) == re.sub(r"[\d.]+ s$", "", line)
    assert re.search(r" · [\d.]+ s$", told)


def test_the_time_is_that_from_the_first_cause_to_the_world_that_holds():
    changes = WorldChanges()
    play(changes, *world(1, FOUR))
    changes.happened(Exited("b:1", 1, False, "killed by SIGKILL"), 10.0)
    changes.done(Publish(2, ("a:0", "a:1", "b:0")), 10.1)
    changes.happened(Exited("b:0", 1, False, "killed by SIGKILL"), 10.2)
    changes.done(Publish(3, ("a:0", "a:1")), 10.3)
    assert changes.happened(Formed("a:0", 1, 2), 10.35) == "", "that is of the world before"
    assert changes.happened(Formed("a:0", 1, 3), 10.4) == ""
    told = changes.happened(Formed("a:1", 1, 3), 10.5)
    assert told == "host b lost (killed by SIGKILL) · 2 workers go on · 0.50 s"


def test_an_end_long_ago_is_not_the_reason_for_leaving_now():
    changes = WorldChanges()
    play(changes, *world(1, {"a:0": 1}))
    changes.happened(Exited("b:0", 1, False, "exit code 7"), 1.0)  # never was a member
    play(changes, AskChange(1), *world(2, {"a:0": 1, "b:0": 2}, 4))
    (told,) = play(changes, AskChange(2), *world(3, {"a:0": 1}, 9))
    assert told.startswith("host b left · ")


# --- the report of a failure ---


@pytest.fixture
def screen(monkeypatch) -> tuple[JobScreen, Callable[[], str]]:
    """A screen without a terminal, and what it has shown."""
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)

    def shown() -> str:
        data = output.buffer
        assert isinstance(data, io.BytesIO)
        return data.getvalue().decode(errors="replace")

    return JobScreen(), shown


def screen_on(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> JobScreen:
    monkeypatch.setenv("TERM", "xterm")
    for name, stream in (("stdout", terminal.stdout), ("stderr", terminal.stderr)):
        monkeypatch.setattr(sys, name, type("Stream", (), {"buffer": stream})())
    return JobScreen()


def begin_world(screen: JobScreen, generation: int, lives: dict[str, int], step: int = -1) -> None:
    for moment in world(generation, lives, step):
        if isinstance(moment, (Ready, Formed)):
            screen.happened(moment)
        else:
            screen.done(moment)  # type: ignore[arg-type]


def test_lines_of_workers_are_passed_on_with_their_rank(screen):
    screen, shown = screen
    screen.line("a:0", "stdout", b"early\n")
    begin_world(screen, 1, {"b:0": 1, "a:0": 1})
    screen.line("a:0", "stdout", b"no newline")
    screen.line("b:0", "stderr", "böse \udcff".encode(errors="surrogateescape"))
    screen.done(Spawn("b:0", 2))
    screen.line("b:0", "stdout", b"another process\n")
    assert "[a:0]<stdout>:early\n" in shown()
    assert "[1]<stdout>:no newline\n" in shown()
    assert "[0]<stderr>:böse" in shown()
    assert "[b:0]<stdout>:another process\n" in shown()


def test_the_report_is_headed_by_the_first_failure_and_ends_with_its_traceback(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1, "b:0": 1})
    for number in range(30):
        screen.line("b:0", "stdout", f"step {number}\n".encode())
    screen.line("b:0", "stderr", b"ValueError: bad number\n")
    screen.happened(Exited("b:0", 1, False, "exit code 1"))
    screen.line("a:0", "stderr", b"another error\n")
    screen.happened(Exited("a:0", 1, False, "exit code 1"))
    end = End(1, "every worker failed at step 5: ValueError: bad number")
    screen.done(end)
    screen.ended(end)
    report = shown()[shown().index("edlrun: the job failed") :].splitlines()
    assert report[0] == "edlrun: the job failed: every worker failed at step 5: ValueError: bad number"
    assert report[1] == "edlrun: first failure: host b, slot 0, rank 1 of 2, generation 1: exit code 1"
    assert report[2] == "edlrun: its last lines:"
    assert report[3:] == [f"    step {number}" for number in range(11, 30)] + ["    ValueError: bad number"]


def test_a_failure_that_was_overcome_is_not_the_cause_of_a_later_one(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1, "b:0": 1})
    screen.happened(Exited("b:0", 1, False, "killed by SIGKILL"))
    screen.beat("a:0", replace(BEAT, generation=1, step=9))  # was on its way
    begin_world(screen, 2, {"a:0": 1}, step=9)
    screen.beat("a:0", replace(BEAT, generation=2, step=9))
    assert screen._failures.first is not None, "the new world has done nothing yet"
    screen.beat("a:0", replace(BEAT, generation=2, step=10))
    screen.happened(Exited("a:0", 1, False, "killed by SIGSEGV"))
    screen.ended(End(1, "fewer than 2 workers were ready for 600 s"))
    assert (
        "first failure: host a, slot 0, rank 0 of 1, generation 2: killed by SIGSEGV (a crash in native code;"
        in shown()
    )
    assert "edlrun: it printed nothing" in shown()


def test_a_failure_before_any_world_and_one_that_we_caused_are_told_as_such(screen):
    screen, shown = screen
    screen.done(Spawn("a:0", 1))
    screen.done(Kill("a:0", 1, "it was not ready 1800 s after its start"))
    screen.happened(Exited("a:0", 1, False, "killed by SIGKILL"))
    screen.ended(End(1, "no luck"))
    assert "slot 0, before it was a member of a world: killed by SIGKILL, because it was not ready 1800 s" in shown()


def test_who_is_ended_with_the_job_is_no_failure(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1})
    end = End(1, "fewer than 2 workers were ready for 600 s")
    screen.done(end)
    screen.happened(Exited("a:0", 1, False, "killed by SIGTERM"))
    screen.ended(end)
    assert "first failure" not in shown()


def test_other_ends_and_notes_are_one_line_each(screen):
    screen, shown = screen
    screen.done(SetAside("b", 60.0))
    screen.problem("exit code 3")
    screen.note("asked to leave b within 120 s")
    screen.ended(End(0))
    screen.ended(End(75, "every host is left; run it again to go on"))
    assert shown().splitlines() == [
        "edlrun: host b keeps failing and gets no workers for 60 s",
        "edlrun: discovery: exit code 3",
        "edlrun: asked to leave b within 120 s",
        "edlrun: training is complete after 0 s",
        "edlrun: every host is left; run it again to go on",
    ]


def test_on_a_terminal_the_line_stays_at_the_bottom_until_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")

    async def job() -> None:
        screen = screen_on(terminal, monkeypatch)
        begin_world(screen, 1, {"a:0": 1, "b:0": 1})
        screen.status(TRAINING)
        screen.line("a:0", "stdout", b"one\n")
        screen.note("something")
        await asyncio.sleep(0)
        screen._output.flush()
        screen.ended(End(0))

    asyncio.run(job())
    lines = terminal.lines()
    assert lines[:3] == ["edlrun: training starts with 2 workers", "[0]<stdout>:one", "edlrun: something"]
    assert lines[3:] == ["edlrun: training is complete after 0 s", ""]
    assert "● step 12,345" in terminal._read.decode()


def test_a_terminal_that_can_do_nothing_gets_no_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    for name, stream in (("stdout", terminal.stdout), ("stderr", terminal.stderr)):
        monkeypatch.setattr(sys, name, type("Stream", (), {"buffer": stream})())
    screen = JobScreen()
    screen.status(TRAINING)
    screen.close()
    assert terminal.lines() == [""]


# --- how it stands ---


def told(*happenings: object, rules: Rules | None = None) -> Membership:
    """The membership after these, one second apart."""
    membership = begin(rules or Rules(2, 2, 4, settle_s=0.0), 0.0)
    for second, happening in enumerate(happenings):
        membership, _ = advance(membership, happening, float(second))  # type: ignore[arg-type]
    return membership


START = (HostsFound((HostSlots("a", 1), HostSlots("b", 1))), Ready("a:0", 1), Ready("b:0", 1))
RUNNING = (*START, Formed("a:0", 1, 1), Formed("b:0", 1, 1))


def seen(membership: Membership, now_s: float) -> Status:
    return describe(membership, now_s, 0.0, Figures(), {}, {})


def test_before_the_first_world_it_waits_for_workers():
    status = seen(told(*START[:2]), 1.0)
    assert (status.state, status.generation) == ("starting", 0)
    assert status.shortage == Shortage(2, 1, ("1 is starting",), None)
    assert [(one.worker, one.state) for one in status.workers] == [("a:0", "ready"), ("b:0", "starting")]


def test_workers_are_shown_with_what_they_said_last():
    heard = {"a:0": Heard(replace(BEAT, step=41, phase="input", phase_s=0.25), 9.5)}
    status = describe(told(*RUNNING), 10.0, 77.0, Figures(step=41), heard, {"a:0": Process(123, "mark")})
    assert (status.at, status.state, status.generation, status.size) == (77.0, "training", 1, 2)
    one, other = status.workers
    assert (one.worker, one.rank, one.step, one.phase, one.phase_s, one.beat_age_s) == (
        "a:0",
        0,
        41,
        "input",
        0.25,
        0.5,
    )
    assert (one.pid, one.mark) == (123, "mark")
    assert (other.rank, other.step, other.beat_age_s, other.pid) == (1, None, None, None)


def test_below_min_the_reason_and_the_remaining_time_are_told():
    crash = Exited("b:0", 1, False, "killed by SIGKILL")
    membership = told(*RUNNING, crash, Ready("a:0", 1, 9))
    status = seen(membership, 6.2)
    assert status.state == "waiting"
    assert status.shortage is not None
    assert (status.shortage.needed, status.shortage.ready) == (2, 1)
    fewer = HostsFound((HostSlots("a", 1),))
    status = seen(told(*RUNNING, fewer, crash, Ready("a:0", 1, 9)), 16.0)
    assert status.shortage == Shortage(2, 1, ("discovery lists 1 slot",), 600.0 - 9.0)
    left = (DrainAsked("b", 30.0), Ready("a:0", 1, 9), Ready("b:0", 1, 9), Exited("b:0", 1, True, ""))
    status = seen(told(*RUNNING, *left), 20.0)
    assert status.shortage is not None
    assert status.shortage.reasons == ("b is drained",)
    assert status.drains == (Remaining("b", 15.0),)


def test_a_host_that_is_set_aside_and_a_slot_that_waits_are_told():
    rules = Rules(2, 2, 4, settle_s=0.0, host_failures=1)
    crash = Exited("b:0", 1, False, "exit code 1")
    status = seen(told(*RUNNING, crash, Ready("a:0", 1, 9), rules=rules), 10.0)
    assert status.aside == (Remaining("b", 55.0),)
    assert status.shortage is not None
    assert status.shortage.reasons == ("host b is set aside for 55 s",)
    status = seen(told(*RUNNING, crash, Ready("a:0", 1, 9)), 5.5)
    assert status.shortage is not None
    assert "b:0 starts again in 0 s" in status.shortage.reasons or "1 is starting" in status.shortage.reasons


def test_a_job_whose_hosts_are_all_drained_is_stopping_whatever_befell_them_before():
    rules = Rules(2, 1, 4, settle_s=0.0, host_failures=1, cooldown_s=0.5)
    crash = Exited("b:0", 1, False, "exit code 1")
    left = (DrainAsked("a", 60.0), DrainAsked("b:0", 60.0))
    assert seen(told(*RUNNING, crash, *left[:1], rules=rules), 7.0).state == "regrouping"
    assert seen(told(*RUNNING, *left), 7.0).state == "stopping"
    assert seen(told(*RUNNING, crash, *left, rules=rules), 8.0).state == "stopping"


def test_a_pace_is_that_of_late_and_falls_when_nothing_moves():
    pace = Pace()
    assert pace.per_s(0.0) is None
    for second in range(100):
        pace.feel(float(second), 1000 + (10 if second < 50 else 30) * second)
    assert pace.per_s(99.0) == pytest.approx(30)
    assert pace.per_s(130.0) < 15
    slow = Pace()
    for minute in range(5):
        slow.feel(60.0 * minute, 600 * (minute + 1))
    assert slow.per_s(270.0) == pytest.approx(10), "steps of a minute each"
    slow.feel(300.0, 5)  # restored from an older checkpoint
    assert slow.per_s(300.0) is None


class Keeper:
    """What the reporter's status is written to, and a screen that hears nothing."""

    def __init__(self) -> None:
        self.written: list[Status] = []
        self.notes: list[str] = []
        self.broken = False

    def write(self, status: Status) -> None:
        if self.broken:
            raise OSError("disk full")
        self.written.append(status)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Idle:
    """Starts processes that do nothing."""

    async def start(self, worker: str, variables: object) -> object:
        await asyncio.Event().wait()
        raise AssertionError


def test_the_status_is_kept_at_each_change_and_a_full_disk_stops_nothing(tmp_path: Path):
    keeper = Keeper()

    begun = Status(0.0, "starting", figures=Figures(known_step=7, saved_step=5))

    async def watch() -> None:
        reporter = Reporter(keeper, keeper.write, begun)  # type: ignore[arg-type]
        job = Job(Rules(1, 1, 1), Idle(), Network(lambda host: "127.0.0.1"), reporter, known_step=7)  # type: ignore[arg-type]
        reporter.watch(job)
        await job.start()
        stop = False
        running = asyncio.create_task(job.run(end_now=lambda: stop))
        while not keeper.written:
            await asyncio.sleep(0.01)
        assert (keeper.written[0].state, keeper.written[0].figures) == ("starting", Figures(known_step=7, saved_step=5))
        keeper.broken = True
        job.found((HostSlots("a", 1),))
        while not keeper.notes:
            await asyncio.sleep(0.01)
        keeper.broken = False
        job.happen(Ready("a:0", 1))
        while keeper.written[-1].generation != 1:
            await asyncio.sleep(0.01)
        reporter.beat("a:0", replace(BEAT, step=0, samples=0))
        reporter.beat("a:0", replace(BEAT, step=8, samples=128, saved_step=8))
        stop = True
        for life in list(job._lives):
            life.cancel()
        await reporter.close(await running)

    asyncio.run(watch())
    assert keeper.notes == ["the job's status cannot be kept: disk full; the job goes on"]
    last = keeper.written[-1]
    assert (last.state, last.end) == ("ended", End(130, "interrupted"))
    assert (last.figures.step, last.figures.samples, last.figures.saved_step) == (8, 128, 8)


def test_a_job_that_could_not_begin_keeps_what_it_knew_of_the_one_before():
    keeper = Keeper()
    orphan = WorkerStatus("a:0", "orphaned", pid=7, mark="mark")
    begun = Status(0.0, "starting", figures=Figures(known_step=7), workers=(orphan,))
    asyncio.run(Reporter(keeper, keeper.write, begun).close(End(1, "no hosts")))  # type: ignore[arg-type]
    (status,) = keeper.written
    assert (status.state, status.figures.known_step, status.workers) == ("ended", 7, (orphan,))
