"""Hosts that Kubeflow's MPI operator writes into the launcher of an MPIJob."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.sources.hostfile import HostsFile, read_whole_file
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host

FOLDER = "/etc/mpi"
# Where the operator mounts its ConfigMap (mpi-operator, configMountPath).
_ECHO = re.compile(r"echo\s+(\S+)\s*")


@dataclass(frozen=True)
class MpiJob(Source):
    """The workers of an MPIJob, as its launcher sees them.

    ``hostfile`` names every worker that the job asks for, with its slots (``name slots=4``; ``name:4`` for Intel MPI
    and MPICH). ``discover_hosts.sh`` prints the workers whose pods are running, of which v2 of the operator names no
    slots: they are those of the hostfile. Where it is there, its hosts count, and it is read, not run: every line
    after the first has to be ``echo NAME`` or ``echo NAME:SLOTS``.

    kubelet replaces both files at once, by pointing the link ``..data`` to another folder; they are read from the one
    that it points to at the moment, or both again.

    Args:
        folder: That of both files.
        slots: Of every worker; ``None``: those that the files name.
    """

    folder: str = FOLDER
    slots: int | None = None

    def answer(self) -> Answer:
        for _ in range(3):  # it is replaced about once per minute at most
            folder = self._data()
            try:
                return Answer(self._read(folder))
            except DiscoveryError:
                if self._data() == folder:
                    raise
        raise DiscoveryError(f"{self.folder} was replaced again and again while it was read; ask again")

    def _data(self) -> str:
        link = os.path.join(self.folder, "..data")
        return os.path.realpath(link) if os.path.lexists(link) else self.folder

    def _read(self, folder: str) -> tuple[HostSlots, ...]:
        script = os.path.join(folder, "discover_hosts.sh")
        # Which has no complete last line only while it is written; HostsFile refuses that, too.
        listed = HostsFile(os.path.join(folder, "hostfile"), self.slots or 1).answer().hosts
        running = listed
        if os.path.lexists(script):
            running = read_script(read_whole_file(script, "MPIJob's script"), script, listed)
        return tuple(replace(entry, slots=self.slots) for entry in running) if self.slots else running


def read_script(text: str, path: str, listed: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
    """The hosts that the operator's ``discover_hosts.sh`` prints; none when it has no line but its first.

    >>> read_script("#!/bin/sh\\necho a.b.c.svc\\n", "script", (HostSlots("a.b.c.svc", 4),))
    (HostSlots(host='a.b.c.svc', slots=4),)

    Args:
        listed: Those of the hostfile, for the slots.

    Raises:
        DiscoveryError: A line is something else, or names a host twice or without slots that are known.
    """
    slots = {entry.host: entry.slots for entry in listed}
    found: dict[str, HostSlots] = {}
    head, *lines = text.splitlines() or [""]
    if not head.startswith("#!"):
        raise DiscoveryError(f"{path} does not begin with '#!/bin/sh'; expected the script of Kubeflow's MPI operator")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        echo = _ECHO.fullmatch(line.strip())
        if not echo:
            raise DiscoveryError(f"{path} line {number}: {line!r} is not understood; expected 'echo NAME'")
        try:
            host = parse_host(echo[1], slots.get(echo[1], 0) or 1)
        except UsageError as error:
            raise DiscoveryError(f"{path} line {number}: {error}") from error
        if ":" not in echo[1] and host.host not in slots:
            raise DiscoveryError(f"{path} line {number}: {host.host} has no slots, and the hostfile does not list it")
        if found.setdefault(host.host, host) is not host:
            raise DiscoveryError(f"{path} line {number}: {host.host} is printed twice; expected each host once")
    return tuple(found.values())


FLAGS, BARE_FLAG = ("folder", "slots", "stale"), "folder"


def from_flags(flags: Flags) -> PolledSource:
    """What ``from_mpijob`` asks."""
    folder = flags.text("folder", "")
    if not folder and not os.path.isdir(FOLDER):
        raise UsageError(f"no folder is given, and {FOLDER}, which the launcher of every MPIJob has, is not there")
    return local_source(MpiJob(folder or FOLDER, flags.count("slots", 1) if flags.all("slots") else None), flags)
