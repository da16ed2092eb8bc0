"""Keep one line at the bottom of a terminal, while other output scrolls above it.

The line stands where the next output begins. Before other output it is erased, and afterwards written again. Nothing
else of the terminal is changed, so a terminal needs no reset after the program was killed.

A stream that cannot be written, as in ``edlrun ... | head -1`` or on a full disk, is given up: the program goes on.
It goes on, too, while nobody reads, as in ``edlrun ... | less``.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from edl_hvd.background_writes import BackgroundWrites

_ERASE = b"\r\x1b[2K"
_PLAIN = b"\x1b[0m"  # a worker may not have ended its colour
_REDRAW_S = 0.1
# Seconds between two drawings of the line; output is held back until then.
_MOST_HELD_BYTES = 1 << 18
# More output than this is printed at once.
_NARROWEST = 20  # columns; a narrower terminal gets no line
_FREE = 3
# Columns for input such as ^C. A full line would continue in the next one, which is not erased.


class LiveLine:
    """Output of a program that may have such a line. No call blocks but :meth:`drain`.

    Args:
        stdout: File for lines of standard output.
        stderr: File for lines of standard error, and for the live line.
        wanted: Whether to keep a live line, if standard error is a terminal and nothing else writes to it.
        later: Function that calls another after N seconds, in the same thread.
        now_s: Function that returns the time in seconds.
        given_up: Told once for each stream that it cannot be written any more, and why; it may print to the other one.
        left_out: Told how many lines were not printed while nobody read; it may print.
    """

    def __init__(
        self,
        stdout: BinaryIO,
        stderr: BinaryIO,
        wanted: bool,
        later: Callable[[float, Callable[[], None]], object],
        now_s: Callable[[], float] = time.monotonic,
        given_up: Callable[[str, OSError], None] = lambda stream, error: None,
        left_out: Callable[[int], None] = lambda lines: None,
    ) -> None:
        # Without its buffer, whose lock the thread would hold at the end of the process while nobody reads.
        self._streams = {"stdout": getattr(stdout, "raw", stdout), "stderr": getattr(stderr, "raw", stderr)}
        self.live = wanted and _is_terminal(stderr) and not _leads_to_a_program(stdout)
        # Both streams go to one terminal.
        self._one = self.live and _is_terminal(stdout) and _device(stdout) == _device(stderr)
        self._later = later
        self._now_s = now_s
        self._given_up = given_up
        self._left_out = left_out
        self._left_out_lines = 0
        writes = BackgroundWrites[str](self._write)
        # In one order where both lead to one place; else one of them may wait for its reader.
        one = writes if _lead_to_one_place(stdout, stderr) else BackgroundWrites[str](self._write)
        self._writes = {"stdout": writes, "stderr": one}
        self._failures: dict[str, OSError] = {}  # written by the thread of the writes
        self._text: Callable[[int], str] = lambda columns: ""
        self._drawn = b""
        self._drawn_s = float("-inf")
        self._held: list[tuple[str, bytes]] = []
        self._held_bytes = 0
        self._scheduled = False

    def write(self, stream: str, data: bytes) -> None:
        """Print whole lines; with a live line they may be held back for 0.1 s."""
        self._look()
        if not self._writes[stream].has_room:
            self._left_out_lines += data.count(b"\n")
            return
        self._tell_left_out()
        if not self.live:
            self._put(stream, data)
            return
        self._held.append((stream, data))
        self._held_bytes += len(data)
        if self._held_bytes > _MOST_HELD_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._later(max(0.0, self._drawn_s + _REDRAW_S - self._now_s()), self._flush_on_time)

    def show(self, text: Callable[[int], str]) -> None:
        """Set the live line.

        Args:
            text: Function from the number of columns to a text that fits; escape codes take no column.
        """
        self._look()
        self._text = text
        if self.live and not self._held and self._writes["stderr"].has_room:
            self._draw()

    def flush(self) -> None:
        """Print the output that was held back."""
        if not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        if self._one:
            # In one piece, so that the line does not flicker.
            before = _ERASE if self._drawn else b""
            self._drawn = b""
            self._draw(before + b"".join(data for _, data in held))
            return
        if self._drawn:
            self._put("stderr", _ERASE)
        self._drawn = b""
        for stream, data in _joined(held):
            self._put(stream, data)
        self._draw()

    def close(self) -> None:
        """Remove the live line; there is none from now on."""
        self.flush()
        if self._drawn:
            self._put("stderr", _ERASE)
        self._drawn, self.live = b"", False

    def drain(self) -> None:
        """Wait until everything is printed that was not held back, however long nobody reads."""
        self._wait_for_writes()
        self._tell_left_out()
        self._look()  # which may print, too
        self._wait_for_writes()

    def _flush_on_time(self) -> None:
        self._scheduled = False
        if self.live:
            self.flush()

    def _draw(self, before: bytes = b"") -> None:
        if not self.live:
            return
        try:
            columns = os.get_terminal_size(self._streams["stderr"].fileno()).columns
        except OSError:
            columns = 80
        text = self._text(columns - _FREE).encode() if columns >= _NARROWEST else b""
        if text != self._drawn:
            before += (_ERASE if self._drawn else b"") + (_PLAIN + text + _PLAIN if text else b"")
            self._drawn = text
        if before:
            self._put("stderr", before)
        self._drawn_s = self._now_s()

    def _put(self, stream: str, data: bytes) -> None:
        if stream in self._streams:
            self._writes[stream].put(stream, data)

    def _write(self, stream: str, data: bytes) -> None:
        """In the thread of the writes."""
        if stream in self._failures:
            return
        try:
            _write_all(self._streams[stream], data)
        except OSError as error:
            self._failures[stream] = error

    def _wait_for_writes(self) -> None:
        for writes in self._writes.values():
            writes.drain()

    def _tell_left_out(self) -> None:
        if self._left_out_lines and all(writes.has_room for writes in self._writes.values()):
            lines, self._left_out_lines = self._left_out_lines, 0
            self._left_out(lines)

    def _look(self) -> bool:
        """Give up the streams that have failed; whether there were any."""
        if not self._failures:
            return False
        failed = [(stream, error) for stream, error in self._failures.copy().items() if stream in self._streams]
        for stream, _ in failed:
            target = self._streams.pop(stream)
            if stream == "stderr":
                self.live, self._drawn = False, b""
            # Whoever else prints there must not fail, nor the flush at the end of the process: exit code 120.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), target.fileno())
        for stream, error in failed:
            self._given_up(stream, error)
        return bool(failed)


def _write_all(target: BinaryIO, data: bytes) -> None:
    """Wait for room where another program has made the stream non-blocking."""
    is_flushed = False
    while not is_flushed:
        try:
            while data:
                data = data[target.write(data) or 0 :]
            target.flush()
            is_flushed = True
        except BlockingIOError as error:
            data = data[error.characters_written :]
            select.select([], [target], [])


def _joined(held: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Join neighbouring pieces of one stream."""
    joined: list[tuple[str, list[bytes]]] = []
    for stream, data in held:
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(data)
        else:
            joined.append((stream, [data]))
    return [(stream, b"".join(pieces)) for stream, pieces in joined]


def _is_terminal(stream: BinaryIO) -> bool:
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


def _lead_to_one_place(one: BinaryIO, other: BinaryIO) -> bool:
    try:
        return one is other or os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):
        return False


def _device(stream: BinaryIO) -> int:
    return os.fstat(stream.fileno()).st_rdev


def _leads_to_a_program(stream: BinaryIO) -> bool:
    """Whether the stream goes to a program such as ``tee``, which may print to the same terminal at any time."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
