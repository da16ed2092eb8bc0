"""What a person sees of a job: the bottom line, a line for each change of the world, and the report of a failure."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from terminals import Terminal, Time, live

from edl_hvd.background_writes import MOST_WAITING_BYTES
from edl_hvd.cli import formatting
from edl_hvd.cli.job_screen import JobScreen
from edl_hvd.cli.live_line import LiveLine
from edl_hvd.cli.world_changes import WorldChanges
from edl_hvd.driver.membership.events import (
    End,
    Exited,
    Exiting,
    Formed,
    Kill,
    Publish,
    QuarantineHost,
    Ready,
    RequestResize,
    Spawn,
)
from edl_hvd.driver.status import Countdown, Shortage, Status, TrainingProgress
from edl_hvd.protocol import Beat

BEAT = Beat(1, 7, 5, 80, -1, "compute", 0.1, 3.0, 4, 5, 5, 0.1)
TRAINING = Status(
    0.0, "training", 3, 4, TrainingProgress(step=12_345, samples=1_580_160, samples_per_s=5_120.4, saved_step=12_000)
)


# --- a terminal ---


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
    line.drain()
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
        line.drain()
    assert terminal.lines() == [*(f"err {number}" for number in range(100)), "step 1"]
    assert (tmp_path / "output").read_text() == "".join(f"out {number}\n" for number in range(100))


def test_when_it_is_closed_nothing_is_left_of_it():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    line.write("stdout", b"last words\n")
    line.close()
    line.write("stderr", b"the report\n")
    line.drain()
    assert terminal.lines() == ["last words", "the report", ""]


def test_it_is_drawn_a_few_times_a_second_however_much_is_printed():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    for _ in range(1000):
        line.write("stdout", b"a line of a worker that prints one every millisecond\n")
        time.pass_(0.001)
    line.drain()
    assert len(terminal.lines()) > 900
    assert terminal.repaints <= 11


def test_what_is_printed_at_once_is_not_held_in_memory():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.show(lambda columns: "step 1")
    for _ in range(100):
        line.write("stdout", b"y" * 9_999 + b"\n")
    line.drain()
    assert len(terminal.lines()) > 70, "although no time has passed"


def test_a_worker_that_leaves_a_colour_on_does_not_colour_the_live_line():
    terminal, time = Terminal(), Time()
    line = live(terminal, time)
    line.write("stdout", b"\x1b[31mred\n")
    line.show(lambda columns: "step 1")
    time.pass_(1)
    line.drain()
    assert terminal.lines() == ["red", "step 1"]
    assert b"\x1b[0mstep 1" in terminal._read


@pytest.mark.parametrize("columns", [80, 40, 20, 19])
def test_the_line_fits_the_terminal(columns, monkeypatch):
    terminal = Terminal(columns)
    screen = screen_on(terminal, monkeypatch)
    screen.status(replace(TRAINING, drains=(Countdown("node-with-a-long-name-3", 99.0),), workers=()))
    screen._output.drain()
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
    line.drain()
    assert (output.getvalue(), errors.getvalue()) == (b"one\n", b"two\n")


def test_a_stream_that_is_full_is_given_up_once_and_the_other_one_goes_on():
    errors, told = io.BytesIO(), []
    with open("/dev/full", "wb") as full:
        line = LiveLine(full, errors, True, Time().later, given_up=lambda *failed: told.append(failed))
        for number in range(3):
            line.write("stdout", b"out %d\n" % number)
            line.write("stderr", b"error %d\n" % number)
        line.close()
        line.drain()
    assert [(stream, error.errno) for stream, error in told] == [("stdout", errno.ENOSPC)]
    assert errors.getvalue() == b"error 0\nerror 1\nerror 2\n"


def test_what_cannot_be_written_is_said_above_the_live_line(monkeypatch):
    terminal = Terminal()
    with open("/dev/full", "wb", buffering=0) as full:
        terminal.stdout, at_the_terminal = full, terminal.stdout
        screen = screen_on(terminal, monkeypatch)
        screen.status(TRAINING)
        screen.line("a:0", "stdout", b"one\n")
        screen.close()
    terminal.stdout = at_the_terminal
    shown = terminal.lines()
    assert shown[0].startswith("edlrun: stdout cannot be written any more: No space left on device; the job goes on")
    assert len(shown) == 2


def test_a_terminal_that_is_gone_ends_its_line_and_nothing_else(tmp_path):
    terminal, time, told = Terminal(), Time(), []
    with open(tmp_path / "output", "wb") as output, open("/dev/full", "wb") as gone:
        line = LiveLine(
            output, terminal.stderr, True, time.later, lambda: time.now_s, lambda *failed: told.append(failed)
        )
        line.show(lambda columns: "step 1")
        line.drain()
        os.dup2(gone.fileno(), terminal.stderr.fileno())
        line.write("stdout", b"one\n")
        line.write("stderr", b"two\n")
        time.pass_(1.0)
        line.show(lambda columns: "step 2")
        line.write("stdout", b"three\n")
        line.close()
        line.drain()
    terminal.lines()
    assert [stream for stream, _ in told] == ["stderr"]
    assert not line.live
    assert (tmp_path / "output").read_bytes() == b"one\nthree\n"


def test_while_nobody_reads_nothing_waits_and_what_has_no_room_is_counted(monkeypatch):
    """As ``edlrun ... | less`` does, whose user reads the first page."""
    reading, writing = os.pipe()
    told, errors = [], io.BytesIO()
    text = b"".join(b"%07d\n" % number for number in range(1 << 12))
    with open(reading, "rb") as reader, open(writing, "wb") as pipe:
        line = LiveLine(pipe, errors, False, Time().later, left_out=told.append)
        most = 2 * MOST_WAITING_BYTES // len(text)
        for _ in range(most):
            line.write("stdout", text)
        assert told == []
        with ThreadPoolExecutor() as pool:
            read = pool.submit(reader.read)
            line.drain()
            line.write("stdout", b"the end\n")
            line.drain()
            pipe.close()
        found = read.result()
    [lines] = told
    whole = found.removesuffix(b"the end\n")
    assert whole == text * (len(whole) // len(text))
    assert len(whole) // 8 + lines == most << 12
    assert MOST_WAITING_BYTES <= len(whole) < MOST_WAITING_BYTES + (1 << 20)


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
        (replace(TRAINING, progress=TrainingProgress(3, samples_per_s=0.26)),
         "step 3 · 0.3 samples/s · 4 workers · no checkpoint yet"),
        (replace(TRAINING, size=1, progress=TrainingProgress(3, saved_step=2, saved_age_s=125)),
         "step 3 · 1 worker · checkpoint 2 (2:05 min ago)"),
        (replace(TRAINING, state="regrouping"), "regrouping · step 12,345 · 4 workers · checkpoint 12,000"),
        (replace(TRAINING, state="waiting", shortage=Shortage(2, 1, ("host b is quarantined for 43 s",), 572.3)),
         "waiting for workers · 1 of 2 ready · gives up in 9:32 min · host b is quarantined for 43 s"),
        (replace(TRAINING, state="starting", shortage=Shortage(4, 0, ("4 are starting",), None)),
         "waiting for workers · 0 of 4 ready · 4 are starting"),
    ],
)  # fmt: skip
def test_the_line_says_how_the_job_stands(status, shown):
    assert formatting.join(formatting.status_line(status)) == shown


def member(generation: int = 1, *names: str) -> Publish:
    return Publish(generation, names)


def play(changes: WorldChanges, *moments: object) -> list[str]:
    """Events and actions, one after the other, each after a tenth of a second."""
    told = []
    for number, moment in enumerate(moments):
        if isinstance(moment, (Exiting, Exited, Formed, Ready)):
            told.append(changes.on_event(moment, 0.1 * number))
        else:
            told.append(changes.done(moment, 0.1 * number))  # type: ignore[arg-type]
    return [line for line in told if line]


def world(generation: int, incarnations: dict[str, int], step: int = -1) -> list[object]:
    """A world comes to be."""
    started = [Spawn(worker, incarnation) for worker, incarnation in incarnations.items()]
    ready = [Ready(worker, incarnation, step) for worker, incarnation in incarnations.items()]
    formed = [Formed(worker, incarnation, generation) for worker, incarnation in incarnations.items()]
    return [*started, *ready, Publish(generation, tuple(incarnations)), *formed]


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
        ([RequestResize(1), *world(2, {"a:0": 1, "a:1": 1}, 5)], "host b left · 2 workers go on · step 5 · 0.70 s"),
        ([RequestResize(1), *world(2, {**FOUR, "c:0": 1, "c:1": 1}, 5)],
         "host c joined · 6 workers go on · step 5 · 2.30 s"),
        ([RequestResize(1), *world(2, {**FOUR, "b:2": 1}, 5)], "b:2 joined · 5 workers go on · step 5 · 2.00 s"),
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
    changes.on_event(Exited("b:1", 1, False, "killed by SIGKILL"), 10.0)
    changes.done(Publish(2, ("a:0", "a:1", "b:0")), 10.1)
    changes.on_event(Exited("b:0", 1, False, "killed by SIGKILL"), 10.2)
    changes.done(Publish(3, ("a:0", "a:1")), 10.3)
    assert changes.on_event(Formed("a:0", 1, 2), 10.35) == "", "that is of the world before"
    assert changes.on_event(Formed("a:0", 1, 3), 10.4) == ""
    told = changes.on_event(Formed("a:1", 1, 3), 10.5)
    assert told == "host b lost (killed by SIGKILL) · 2 workers go on · 0.50 s"


def test_the_line_waits_for_how_a_process_has_ended_and_its_time_does_not():
    changes = WorldChanges()
    play(changes, *world(1, FOUR))
    changes.on_event(Exiting("b:1", 1), 10.0)
    changes.done(Publish(2, ("a:0", "a:1", "b:0")), 10.1)
    assert [changes.on_event(Formed(worker, 1, 2), 10.2) for worker in ("a:0", "a:1", "b:0")] == ["", "", ""]
    told = changes.on_event(Exited("b:1", 1, False, "killed by SIGKILL"), 17.0)
    assert told == "b:1 lost (killed by SIGKILL) · 3 workers go on · 0.20 s"


@pytest.mark.parametrize("then", [Publish(3, ("a:0", "a:1")), End(1, "it is over")])
def test_the_line_waits_no_longer_than_until_the_next_resize_or_the_end(then):
    changes = WorldChanges()
    play(changes, *world(1, FOUR))
    changes.on_event(Exiting("b:1", 1), 10.0)
    changes.done(Publish(2, ("a:0", "a:1", "b:0")), 10.1)
    assert not any(changes.on_event(Formed(worker, 1, 2), 10.2) for worker in ("a:0", "a:1", "b:0"))
    assert changes.done(then, 10.9) == "b:1 lost (its process ends) · 3 workers go on · 0.20 s"


def test_a_process_that_ends_outside_the_world_keeps_no_line_waiting():
    changes = WorldChanges()
    play(changes, *world(1, FOUR))
    changes.on_event(Exiting("c:0", 1), 10.0)
    (told,) = play(changes, RequestResize(1), *world(2, {"a:0": 1, "a:1": 1}, 5))
    assert told.startswith("host b left · ")


def test_an_end_long_ago_is_not_the_reason_for_leaving_now():
    changes = WorldChanges()
    play(changes, *world(1, {"a:0": 1}))
    changes.on_event(Exited("b:0", 1, False, "exit code 7"), 1.0)  # never was a member
    play(changes, RequestResize(1), *world(2, {"a:0": 1, "b:0": 2}, 4))
    (told,) = play(changes, RequestResize(2), *world(3, {"a:0": 1}, 9))
    assert told.startswith("host b left · ")


# --- the report of a failure ---


@pytest.fixture
def screen(monkeypatch) -> tuple[JobScreen, Callable[[], str]]:
    """A screen without a terminal, and what it has shown."""
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)

    made = JobScreen()

    def shown() -> str:
        made.close()
        data = output.buffer
        assert isinstance(data, io.BytesIO)
        return data.getvalue().decode(errors="replace")

    return made, shown


def screen_on(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> JobScreen:
    monkeypatch.setenv("TERM", "xterm")
    for name, stream in (("stdout", terminal.stdout), ("stderr", terminal.stderr)):
        monkeypatch.setattr(sys, name, type("Stream", (), {"buffer": stream})())
    return JobScreen()


def begin_world(screen: JobScreen, generation: int, incarnations: dict[str, int], step: int = -1) -> None:
    for moment in world(generation, incarnations, step):
        if isinstance(moment, (Ready, Formed)):
            screen.on_event(moment)
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


def test_the_report_names_the_world_in_which_a_process_began_to_end(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1, "b:0": 1})
    screen.on_event(Exiting("b:0", 1))
    begin_world(screen, 2, {"a:0": 1})
    screen.on_event(Exited("b:0", 1, False, "killed by SIGSEGV"))
    screen.ended(End(1, "it is over"))
    assert "host b, slot 0, rank 1 of 2, generation 1: killed by SIGSEGV" in shown()
    assert "b:0 lost (killed by SIGSEGV) · 1 worker goes on" in shown()


def test_the_report_is_headed_by_the_first_failure_and_ends_with_its_traceback(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1, "b:0": 1})
    for number in range(30):
        screen.line("b:0", "stdout", f"step {number}\n".encode())
    screen.line("b:0", "stderr", b"ValueError: bad number\n")
    screen.on_event(Exited("b:0", 1, False, "exit code 1"))
    screen.line("a:0", "stderr", b"another error\n")
    screen.on_event(Exited("a:0", 1, False, "exit code 1"))
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
    screen.on_event(Exited("b:0", 1, False, "killed by SIGKILL"))
    screen.beat("a:0", replace(BEAT, generation=1, step=9))  # was on its way
    begin_world(screen, 2, {"a:0": 1}, step=9)
    screen.beat("a:0", replace(BEAT, generation=2, step=9))
    assert screen._failures.first is not None, "the new world has done nothing yet"
    screen.beat("a:0", replace(BEAT, generation=2, step=10))
    screen.on_event(Exited("a:0", 1, False, "killed by SIGSEGV"))
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
    screen.on_event(Exited("a:0", 1, False, "killed by SIGKILL"))
    screen.ended(End(1, "no luck"))
    assert "slot 0, before it was a member of a world: killed by SIGKILL, because it was not ready 1800 s" in shown()


def test_who_is_ended_with_the_job_is_no_failure(screen):
    screen, shown = screen
    begin_world(screen, 1, {"a:0": 1})
    end = End(1, "fewer than 2 workers were ready for 600 s")
    screen.done(end)
    screen.on_event(Exited("a:0", 1, False, "killed by SIGTERM"))
    screen.ended(end)
    assert "first failure" not in shown()


def test_other_ends_and_notes_are_one_line_each(screen):
    screen, shown = screen
    screen.done(QuarantineHost("b", 60.0))
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
        screen.close()

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
