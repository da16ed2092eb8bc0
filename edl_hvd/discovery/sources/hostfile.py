"""Hosts in files: those of ``-H`` and of hostfiles, read once, and a hosts file that is read at every poll.

Batch systems and users write a hostfile before the job: it may have a host on several lines, and no newline at its end.
A hosts file changes while the job runs: what may be an incomplete file is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host

_SLOTS = re.compile(r"\s+slots\s*=\s*")
_MOST_SLOTS = re.compile(r"\smax[-_]slots\s*=\s*[0-9]+")
# Open MPI's bound for more workers than slots, which do not occur here.


@dataclass(frozen=True)
class FixedHosts(Source):
    """A source whose answer never changes."""

    listed: tuple[HostSlots, ...]

    def answer(self) -> Answer:
        return Answer(self.listed)


def parse_host_list(text: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Read ``host:slots,host:slots``; a host that is named twice has the slots of both, as with MPI.

    >>> parse_host_list("node-1:4,node-2:2")
    (HostSlots(host='node-1', slots=4), HostSlots(host='node-2', slots=2))

    Raises:
        UsageError: One line per entry that is not understood.
    """
    return _add_up((("", entry) for entry in text.split(",")), default_slots)


def read_hostfile(path: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Read a file of ``host``, ``host:4`` or ``host slots=4 max-slots=8`` lines; ``#`` starts a comment.

    A host on several lines has the sum of their slots: batch systems write one line per slot.

    Raises:
        UsageError: The file cannot be read or lists no host; or one line for each of its lines that is not understood.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}; expected lines such as 'node-1 slots=4'") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it is no text file ({error.reason}); expected lines such as 'node-1 slots=4'") from error
    entries = [(f"line {number}: ", line.partition("#")[0].strip()) for number, line in enumerate(lines, start=1)]
    named = [(place, _named_slots(entry)) for place, entry in entries if entry]
    if not named:
        raise UsageError("it lists no host; expected a line such as 'node-1 slots=4'")
    return _add_up(named, default_slots)


def _named_slots(line: str) -> str:
    """A line of Horovod or Open MPI in the form ``host:slots``.

    >>> _named_slots("node-1 slots=4 max-slots=8")
    'node-1:4'
    """
    return _SLOTS.sub(":", _MOST_SLOTS.sub("", line))


def _add_up(entries: Iterable[tuple[str, str]], default_slots: int) -> tuple[HostSlots, ...]:
    """The hosts of ``(place, text)`` entries, in the order of their first mention."""
    slots: dict[str, int] = {}
    problems: list[str] = []
    for place, text in entries:
        try:
            host = parse_host(text, default_slots)
            slots[host.host] = slots.get(host.host, 0) + host.slots
        except UsageError as error:
            problems.append(f"{place}{error}")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(HostSlots(host, count) for host, count in slots.items())


@dataclass(frozen=True)
class HostsFile(Source):
    """The hosts of a file, which is read at every poll.

    A line is ``host``, ``host:slots`` or ``host slots=4 max-slots=8``, as in hostfiles of Horovod and Open MPI; ``#``
    starts a comment. A last line without its newline, or a file without a host, counts as a write in progress and
    raises. Programs that replace the file (``os.replace``, ``mv``) never cause that.

    Args:
        path: Path of the file.
        default_slots: Number of slots of a host that names none.
    """

    path: str
    default_slots: int = 1

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def answer(self) -> Answer:
        text = read_whole_file(self.path, "hosts file")
        found: dict[str, HostSlots] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            try:
                host = parse_host(_named_slots(entry), self.default_slots)
            except UsageError as error:
                raise DiscoveryError(f"{self.path} line {number}: {error}") from error
            if host.host in found:
                raise DiscoveryError(f"{self.path} line {number}: {host.host} is listed twice; expected each host once")
            found[host.host] = host
        if not found:
            raise DiscoveryError(f"{self.path} lists no host; expected a line such as 'node-1 slots=4'")
        return Answer(tuple(found.values()), holds_s=math.inf)


def read_whole_file(path: str, what: str) -> str:
    """Read a text file that ends in a newline, which shows that it is complete.

    Raises:
        DiscoveryError: The file cannot be read, or its last line is not complete.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors of Windows begin a file with a byte order mark
            text = file.read()
    except OSError as error:
        raise DiscoveryError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DiscoveryError(f"the {what} {path} is not text: {error}") from error
    if text and not text.endswith("\n"):
        last = text.rpartition("\n")[2]
        raise DiscoveryError(
            f"the {what} {path} ends in the middle of the line {last!r}; expected a newline at its end"
        )
    return text


FLAGS, BARE_FLAG = ("file", "slots", "stale"), "file"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_file``."""
    flags.needed("file", "hosts file", "from_file hosts.txt")
    return local_source(HostsFile(flags.text("file", ""), flags.count("slots", 1)), flags)
