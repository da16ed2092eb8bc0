"""A terminal whose bottom line is kept for one text, while everything else scrolls above it.

The line stands where the next output will begin. To print something it is erased, and written again below. Nothing
else of the terminal is touched, so a program that is killed leaves no terminal behind that has to be reset.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

_ERASE = b"\r\x1b[2K"
_PLAIN = b"\x1b[0m"  # a worker may have left a colour on
_REDRAW_S = 0.1
# Ten times a second at most; until then output is held back, if there is so much of it.
_MOST_HELD_BYTES = 1 << 18
_NARROWEST = 20  # columns, below which there is no line
_FREE = 3
# Columns for what is typed, such as ^C. A line that is full would go on in the next, which is not erased.


class LiveLine:
    """The output of a program that may have such a line.

    Args:
        stdout: Where lines of this stream go.
        stderr: Where lines of this stream go, and the live line.
        wanted: Keep a live line, if standard error is a terminal and nothing else writes to it.
        later: Calls a function after so many seconds, in the same thread.
        now_s: Tells the time.
    """

    def __init__(
        self,
        stdout: BinaryIO,
        stderr: BinaryIO,
        wanted: bool,
        later: Callable[[float, Callable[[], None]], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self.live = wanted and _is_terminal(stderr) and not _leads_to_a_program(stdout)
        # Both lead to one terminal, whichever is written to.
        self._one = self.live and _is_terminal(stdout) and _device(stdout) == _device(stderr)
        self._later = later
        self._now_s = now_s
        self._text: Callable[[int], str] = lambda columns: ""
        self._drawn = b""
        self._drawn_s = float("-inf")
        self._held: list[tuple[str, bytes]] = []
        self._held_bytes = 0
        self._scheduled = False

    def write(self, stream: str, data: bytes) -> None:
        """Print whole lines. With a live line they may wait for a tenth of a second."""
        if not self.live:
            self._streams[stream].write(data)
            self._streams[stream].flush()
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
            text: Gets the columns that there are, and returns what fits; escape codes take none.
        """
        self._text = text
        if self.live and not self._held:
            self._draw()

    def flush(self) -> None:
        """Print what was held back."""
        if not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        if self._one:
            # In one piece, so that no picture of the terminal is without the line.
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
        """Take the live line away, for good."""
        self.flush()
        if self._drawn:
            self._put("stderr", _ERASE)
        self._drawn, self.live = b"", False

    def _flush_on_time(self) -> None:
        self._scheduled = False
        if self.live:
            self.flush()

    def _draw(self, before: bytes = b"") -> None:
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
        target = self._streams[stream]
        target.write(data)
        target.flush()


def _joined(held: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The same output in fewer pieces: neighbours of one stream as one."""
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


def _device(stream: BinaryIO) -> int:
    return os.fstat(stream.fileno()).st_rdev


def _leads_to_a_program(stream: BinaryIO) -> bool:
    """Such as ``tee``, which may print to the same terminal at any time."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
