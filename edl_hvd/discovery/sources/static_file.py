"""Hosts listed in a text file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.question import Question, ask_locally
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host

_SLOTS_WORD = re.compile(r"\s+slots\s*=\s*")


@dataclass(frozen=True)
class StaticFile(Source):
    """The hosts of a hostfile, read anew each time.

    A line is ``host``, ``host:slots`` or ``host slots=4`` (the form of Horovod's and Open MPI's
    hostfiles); ``#`` starts a comment. A change counts when the file is whole again: a last line without
    its newline, or a file without a host, is taken for a write in progress and raises. Writers that
    replace the file (``os.replace``, ``mv``) are never seen half-way.

    Args:
        path: The file.
        default_slots: Slots of a host that names none.
    """

    path: str
    default_slots: int = 1

    def answer(self) -> Answer:
        text = read_whole_file(self.path, "hosts file")
        found: dict[str, HostSlots] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            try:
                host = parse_host(_SLOTS_WORD.sub(":", entry), self.default_slots)
            except UsageError as error:
                raise DiscoveryError(f"{self.path} line {number}: {error}") from error
            if host.host in found:
                raise DiscoveryError(f"{self.path} line {number}: {host.host} is listed twice; expected each host once")
            found[host.host] = host
        if not found:
            raise DiscoveryError(f"{self.path} lists no host; expected a line such as 'node-1 slots=4'")
        return Answer(tuple(found.values()))


def read_whole_file(path: str, what: str) -> str:
    """The text of a file that ends in a newline, so that nothing was cut off.

    Raises:
        DiscoveryError: It cannot be read, or its last line is not complete.
    """
    try:
        with open(path, encoding="utf-8") as file:
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


def question(flags: Flags) -> Question:
    """What ``from_file`` asks."""
    flags.needed("file", "hosts file", "from_file hosts.txt")
    return ask_locally(StaticFile(flags.text("file", ""), flags.count("slots", 1)), flags)
