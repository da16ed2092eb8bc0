"""Where a worker's threads stand, as py-spy or Python's own fault handler print it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python3[^/]*/|/edl_hvd/(worker|data|checkpoint|storage)/|^<frozen"
)
# What a script did not write itself.
_FAULT_HANDLER_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FAULT_HANDLER_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')
_PY_SPY_THREAD = re.compile(r'Thread (0x)?[0-9A-Fa-f]+ \([^)]*\)(?:: "(?P<name>.*)")?')
_PY_SPY_FRAME = re.compile(r"    (?P<function>\S+) \((?P<path>.*):(?P<line>\d+)\)")


def place_in(lines: Iterable[str]) -> str:
    """Where the main thread stands, for people; empty if the lines do not tell.

    The innermost frame, and the innermost of the script's own if that is another one.

    >>> place_in(["Current thread 0x0b (most recent call first):", '  File "/job/train.py", line 71 in augment'])
    'train.py:71 in augment'
    """
    frames = _main_thread(lines)
    if not frames:
        return ""
    own = next((text for path, text in frames if not _LIBRARY.search(path)), frames[0][1])
    innermost = frames[0][1]
    return innermost if own == innermost else f"{innermost}, called from {own}"


def shows_stack(line: str) -> bool:
    """Whether a line begins the stack of a thread."""
    return bool(_FAULT_HANDLER_THREAD.match(line) or _PY_SPY_THREAD.fullmatch(line))


def _main_thread(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Path and text of its frames, the innermost first."""
    found: list[tuple[str, str]] = []
    for name, frames in _threads(lines):
        if frames:
            found = frames
        if name == "MainThread":  # of py-spy
            break
    return found  # the fault handler puts it last


def _threads(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    name, frames = "", list[tuple[str, str]]()
    for line in lines:
        if shows_stack(line):
            yield name, frames
            spied = _PY_SPY_THREAD.fullmatch(line)
            name, frames = (spied["name"] or "") if spied else "", []
        frame = _FAULT_HANDLER_FRAME.fullmatch(line) or _PY_SPY_FRAME.fullmatch(line)
        if frame is not None:
            text = f"{PurePath(frame['path']).name}:{frame['line']} in {frame['function']}"
            frames.append((frame["path"], text))
    yield name, frames
