"""Format numbers, times, file contents and a job's status, the same in every command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rich.markup import escape

from edl_hvd.driver.status import JobState, Shortage, Status, TrainingProgress
from edl_hvd.values import count as count

SEPARATOR = " · "
_STATES_IN_WORDS: dict[JobState, str] = {
    "starting": "waiting for workers", "waiting": "waiting for workers", "changing": "changing its workers",
}  # fmt: skip
# Other states are their own words.


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.4, 43, 572, 7380, 200_000)]
    ['0 s', '43 s', '9:32 min', '2 h 3 min', '2 d 7 h']
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def clean(text: str) -> str:
    """One line of visible characters, with markup escaped: text of a file or a worker must not move the cursor.

    >>> clean("a\\x1b[2K\\n b [red]")
    'a?[2K b \\\\[red]'
    """
    line = " ".join(text.split())
    return escape("".join(character if character.isprintable() else "?" for character in line))


def shell_line(words: Sequence[str]) -> str:
    """A command as one line of visible characters that a shell reads as it was given.

    Words with control characters are quoted as ``$'…'``, which bash, zsh and POSIX.1-2024 read.

    >>> print(shell_line(["echo", "two words", "a\\tb"]))
    echo 'two words' $'a\\x09b'
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _escaped(word: str) -> str:
    codes = ("".join(f"\\x{byte:02x}" for byte in one.encode(errors="surrogateescape")) for one in word)
    pairs = zip(word, codes, strict=True)
    return "".join(one if one.isprintable() and one not in "\\'" else code for one, code in pairs)


def join(pieces: Iterable[str]) -> str:
    """Join pieces into one line; empty pieces are left out."""
    return SEPARATOR.join(piece for piece in pieces if piece)


def pace(samples_per_s: float) -> str:
    """
    >>> pace(5321.4), pace(3.27)
    ('5,321 samples/s', '3.3 samples/s')
    """
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.1f} samples/s"


def checkpoint(progress: TrainingProgress) -> str:
    """The step of the newest checkpoint, and its age if it is known."""
    if progress.saved_step < 0:
        return "no checkpoint yet"
    age = "" if progress.saved_age_s is None else f" ({duration(progress.saved_age_s)} ago)"
    return f"checkpoint {progress.saved_step:,}{age}"


def state(status: Status) -> str:
    """The state of a job, in one or two words."""
    return _STATES_IN_WORDS.get(status.state, status.state)


def shortage(short: Shortage) -> list[str]:
    """The number of ready workers, the time until the job gives up, and why workers are missing."""
    pieces = [f"{short.ready} of {short.needed} ready"]
    if short.remaining_s is not None:
        pieces.append(f"gives up in {duration(short.remaining_s)}")
    return [*pieces, *short.reasons]


def status_line(status: Status) -> list[str]:
    """The pieces of a line about a running job, the most important first."""
    if status.shortage is not None:
        return [state(status), *shortage(status.shortage)]
    progress = status.progress
    pieces = [
        "" if status.state == "training" else state(status),
        f"step {progress.step:,}",
        "" if progress.samples_per_s is None or status.state != "training" else pace(progress.samples_per_s),
        count(status.size, "worker"),
        checkpoint(progress),
    ]
    pieces += [f"{drain.who} leaves" for drain in status.drains if _is_there(drain.who, status)]
    return [piece for piece in pieces if piece]


def _is_there(target: str, status: Status) -> bool:
    return any(target in (one.worker, one.worker.rpartition(":")[0]) for one in status.workers)
