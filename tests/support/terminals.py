"""A terminal of which a test sees what it shows, and a time that passes when a test says so."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import tty
from collections.abc import Callable

from waiting import soon

from edl_hvd.cli.live_line import LiveLine


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
        soon(self._reading)
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
