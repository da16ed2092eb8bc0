"""The screen of ``edlrun``: the workers' output, a line for each resize, and on a terminal a line of status."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

from edl_hvd.cli.failure_report import Failures
from edl_hvd.cli.formatting import SEPARATOR, count, duration, join, status_line
from edl_hvd.cli.live_line import LiveLine
from edl_hvd.cli.world_changes import WorldChanges
from edl_hvd.driver.membership.events import (
    Action,
    End,
    Exited,
    Exiting,
    Kill,
    MembershipEvent,
    Publish,
    QuarantineHost,
    Spawn,
)
from edl_hvd.driver.status import JobState, Status
from edl_hvd.protocol import Beat
from edl_hvd.settings import process_environment

_SUCCESS, _FAILURE = 0, 1
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
_MARK = "● "
_COLOURS: dict[JobState, str] = {"training": _GREEN, "finishing": _GREEN, "changing": _CYAN, "regrouping": _CYAN}


class JobScreen:
    """See :class:`edl_hvd.driver.reporter.Screen`.

    Args:
        verbose: Whether to show each decision of the membership.
        timestamps: Whether to put the time before each line of the workers.
    """

    def __init__(self, verbose: bool = False, timestamps: bool = False) -> None:
        environment = process_environment()
        capable = environment.get("TERM", "dumb") != "dumb"
        self._verbose = verbose
        self._timestamps = timestamps
        self._output = LiveLine(
            sys.stdout.buffer, sys.stderr.buffer, capable, _later, given_up=self._on_given_up_stream,
            left_out=self._on_left_out_lines,
        )  # fmt: skip
        self._coloured = self._output.live and not environment.get("NO_COLOR")
        self.latest = Status(time.time(), "starting")  # how the job stood last, for whoever else shows it
        self._world = WorldChanges()
        self._failures = Failures()
        self._ranks: dict[str, str] = {}
        self._restored_step = -1
        self._began_s = time.monotonic()

    # --- the workers' output ---

    def line(self, worker: str, stream: str, line: bytes) -> None:
        """Print a line of a worker behind its rank, as ``horovodrun`` does."""
        self._failures.line(worker, line)
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        prefix = f"{stamp}[{self._ranks.get(worker, worker)}]<{stream}>:".encode()
        self._output.write(stream, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))

    # --- events ---

    def on_event(self, event: MembershipEvent) -> None:
        if isinstance(event, Exiting | Exited):
            self._failures.ended(event, self._world.members, self._world.generation)
        told = self._world.on_event(event, time.monotonic())
        if told:
            self._say(told)

    def done(self, action: Action) -> None:
        told = self._world.done(action, time.monotonic())
        if told:
            self._say(told)
        if isinstance(action, Publish):
            self._ranks = {worker: str(rank) for rank, worker in enumerate(action.members)}
        elif isinstance(action, Spawn):
            self._ranks.pop(action.worker, None)  # that was the rank of the earlier process
        elif isinstance(action, End):
            self._failures.close()
        elif isinstance(action, Kill):
            self._failures.killed(action)
            self._say(f"{action.worker} is killed: {action.reason}")
        elif isinstance(action, QuarantineHost):
            why = f" ({action.reason})" if action.reason else ""
            self._say(f"host {action.host} keeps failing{why} and gets no workers for {action.cooldown_s:.0f} s")
        if self._verbose:
            self._say(str(action))

    def beat(self, worker: str, beat: Beat) -> None:
        if beat.restored_step > self._restored_step:
            self._restored_step = beat.restored_step
            self._say(f"training goes on from the checkpoint of step {beat.restored_step:,}")
        if beat.generation == self._world.generation and beat.step > self._world.step:
            self._failures.forget(beat.generation)  # a step in a new world: the failure is overcome

    def noticed(self, text: str) -> None:
        self._say(text)

    def problem(self, text: str) -> None:
        self._say(f"discovery: {text}")

    def note(self, text: str) -> None:
        self._say(text)

    def status(self, status: Status) -> None:
        self.latest = status
        self._output.show(lambda columns: self._fit(status, columns))

    def ended(self, end: End) -> None:
        self._output.close()
        if end.code == _FAILURE:
            self._report(end)
        elif end.code == _SUCCESS:
            self._say(f"training is complete after {duration(time.monotonic() - self._began_s)}")
        else:
            self._say(end.reason)

    def close(self) -> None:
        """Remove the live line, and wait until everything is printed, or Ctrl-C is pressed."""
        self._output.close()
        with contextlib.suppress(KeyboardInterrupt):
            self._output.drain()

    # --- text ---

    def _report(self, end: End) -> None:
        """Print why the job failed. The first failure is the cause; its traceback comes last, where it is seen."""
        if end.reason:
            self._say(f"the job failed: {end.reason}", _RED)
        failure = self._failures.first
        if failure is None:
            return
        self._say(failure.heading + (f" ({failure.hint})" if failure.hint else ""), _RED)
        self._say("its last lines:" if failure.lines else "it printed nothing")
        text = "".join(f"    {line}\n" for line in failure.lines)
        self._output.write("stderr", text.encode(errors="replace"))

    def _on_given_up_stream(self, stream: str, error: OSError) -> None:
        """Say that a stream fails, on the other one if it is standard output."""
        self._say(
            f"{stream} cannot be written any more: {error.strerror}; the job goes on and prints nothing there "
            "(--output-filename keeps what workers print, Ctrl-C ends the job)"
        )

    def _on_left_out_lines(self, lines: int) -> None:
        self._say(
            f"{count(lines, 'line')} left out here, because nobody read the output; the job went on meanwhile "
            "(--output-filename keeps what workers print)"
        )

    def _say(self, text: str, colour: str = _BOLD) -> None:
        self._output.write("stderr", f"{self._paint('edlrun:', colour)} {text}\n".encode(errors="replace"))

    def _fit(self, status: Status, columns: int) -> str:
        """The status as one line, cut to the width of the terminal."""
        text = _MARK + join(status_line(status))
        if len(text) > columns:
            text = f"{text[: columns - 1]}…"
        colour = _COLOURS.get(status.state, _YELLOW)
        return self._paint(_MARK, colour) + text.removeprefix(_MARK).replace(SEPARATOR, self._paint(SEPARATOR, _DIM))

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured else text


def _later(delay_s: float, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # without a loop the job is over: print at once
        asyncio.get_running_loop().call_later(delay_s, call)
        return
    call()
