"""Hosts in files: those of ``-H`` and of hostfiles, read once, and a hosts file that is read at every poll.

Batch systems and users write a hostfile before the job: it may have a host on several lines, and no newline at its end.
A hosts file changes while the job runs: what may be an incomplete file is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import LOCAL_FLAGS, PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host, read_count, shown

_SLOTS = re.compile(r"\s+slots\s*=\s*")
_DEVICES = re.compile(r"\s+devices\s*=\s*(\S*)")
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
    return _add_up((("", entry) for entry in text.split(",")), parse_host, default_slots)


def read_hostfile(path: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Read a file of lines as :func:`read_host_line` takes them; ``#`` starts a comment.

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
    named = [(place, entry) for place, entry in entries if entry]
    if not named:
        raise UsageError("it lists no host; expected a line such as 'node-1 slots=4'")
    return _add_up(named, read_host_line, default_slots)


def read_host_line(line: str, default_slots: int = 1) -> HostSlots:
    """Read ``host``, ``host:4``, or ``host slots=4 max-slots=8`` of Horovod and Open MPI; ``devices=`` may follow.

    >>> read_host_line("node-1 slots=4 max-slots=8")
    HostSlots(host='node-1', slots=4)
    >>> read_host_line("node-1 devices=2,3").devices
    (2, 3)

    Raises:
        UsageError: It is none of these; or its devices are not one number for each slot, each once.
    """
    named = _DEVICES.search(line)
    if named is None:
        return parse_host(_SLOTS.sub(":", _MOST_SLOTS.sub("", line)), default_slots)
    numbers = [read_count(text) for text in named[1].split(",")]
    devices = tuple(number for number in numbers if number is not None)
    if len(devices) != len(numbers):
        raise UsageError(f"devices={shown(named[1])} is not understood; expected numbers of GPUs, e.g. devices=0,1")
    return replace(read_host_line(_DEVICES.sub("", line), len(devices)), devices=devices)


def _add_up(
    entries: Iterable[tuple[str, str]], read: Callable[[str, int], HostSlots], default_slots: int
) -> tuple[HostSlots, ...]:
    """The hosts of ``(place, text)`` entries, in the order of their first mention."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    problems: list[str] = []
    for place, text in entries:
        try:
            host = read(text, default_slots)
            slots, devices = found.get(host.host, (0, ()))
            found[host.host] = slots + host.slots, devices + host.devices
        except UsageError as error:
            problems.append(f"{place}{error}")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(HostSlots(host, slots, devices) for host, (slots, devices) in found.items())


@dataclass(frozen=True)
class HostsFile(Source):
    """The hosts of a file, which is read at every poll.

    Its lines are those of hostfiles of Horovod and Open MPI, see :func:`read_host_line`; ``#`` starts a comment. A last
    line without its newline, or a file without a host, counts as a write in progress and raises. Programs that replace
    the file (``os.replace``, ``mv``) never cause that.

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
                host = read_host_line(entry, self.default_slots)
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
            f"the {what} {path} ends in the middle of the line {shown(last)}; expected a newline at its end"
        )
    return text


FLAGS, BARE_FLAG = ("file", "slots", *LOCAL_FLAGS), "file"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_file``."""
    flags.needed("file", "hosts file", "from_file hosts.txt")
    return local_source(HostsFile(flags.text("file", ""), flags.count("slots", 1)), flags)
