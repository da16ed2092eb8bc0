"""Workers of an MPIJob as hosts, from the files that Kubeflow's MPI operator puts into its launcher."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import LOCAL_FLAGS, PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.sources.hostfile import HostsFile, read_whole_file
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host, shown

FOLDER = "/etc/mpi"
# Folder at which the operator mounts its ConfigMap (mpi-operator, configMountPath).
_ECHO = re.compile(r"echo\s+(\S+)\s*")


@dataclass(frozen=True)
class MpiJob(Source):
    """The workers of an MPIJob, as its launcher sees them.

    ``hostfile`` names every worker of the job with its slots (``name slots=4``; ``name:4`` for Intel MPI and MPICH).
    ``discover_hosts.sh`` prints the workers whose pods are running; v2 of the operator names no slots there, so those
    of the hostfile count. If that script exists, its hosts count. It is read, not run: each line after the first has to
    be ``echo NAME`` or ``echo NAME:SLOTS``.

    kubelet replaces both files at once: it changes the link ``..data`` to another folder. Both files are read from the
    folder of the link; if the link changes meanwhile, both are read again.

    Args:
        folder: Folder of both files.
        slots: Number of slots of each worker; ``None`` for those that the files name.
    """

    folder: str = FOLDER
    slots: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        folders = (os.path.join(self.folder, "..data"), self.folder)
        names = ("hostfile", "discover_hosts.sh")
        return (folders[0], *(os.path.join(folder, name) for folder in folders for name in names))

    def answer(self) -> Answer:
        for _ in range(3):  # kubelet replaces it about once per minute at most
            folder = self._data()
            try:
                return Answer(self._read(folder), holds_s=math.inf)
            except DiscoveryError:
                if self._data() == folder:
                    raise
        raise DiscoveryError(f"{self.folder} was replaced three times while it was read; repeat the poll")

    def _data(self) -> str:
        link = os.path.join(self.folder, "..data")
        return os.path.realpath(link) if os.path.lexists(link) else self.folder

    def _read(self, folder: str) -> tuple[HostSlots, ...]:
        script = os.path.join(folder, "discover_hosts.sh")
        # An incomplete last line occurs only while the file is written; HostsFile refuses that.
        listed = HostsFile(os.path.join(folder, "hostfile"), self.slots or 1).answer().hosts
        running = listed
        if os.path.lexists(script):
            running = read_script(read_whole_file(script, "MPIJob's script"), script, listed)
        return tuple(replace(entry, slots=self.slots) for entry in running) if self.slots else running


def read_script(text: str, path: str, listed: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
    """Read the hosts that the operator's ``discover_hosts.sh`` prints; none if it has only its first line.

    >>> read_script("#!/bin/sh\\necho a.b.c.svc\\n", "script", (HostSlots("a.b.c.svc", 4),))
    (HostSlots(host='a.b.c.svc', slots=4),)

    Args:
        text: Text of the script.
        path: Path of the script, for messages.
        listed: Hosts of the hostfile, for the slots.

    Raises:
        DiscoveryError: A line has another form, or names a host twice, or one whose slots are unknown.
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
            raise DiscoveryError(f"{path} line {number}: {shown(line)} is not understood; expected 'echo NAME'")
        try:
            host = parse_host(echo[1], slots.get(echo[1].lower(), 0) or 1)
        except UsageError as error:
            raise DiscoveryError(f"{path} line {number}: {error}") from error
        if ":" not in echo[1] and host.host not in slots:
            raise DiscoveryError(f"{path} line {number}: {host.host} has no slots, and the hostfile does not list it")
        if found.setdefault(host.host, host) is not host:
            raise DiscoveryError(f"{path} line {number}: {host.host} is printed twice; expected each host once")
    return tuple(found.values())


FLAGS, BARE_FLAG = ("folder", "slots", *LOCAL_FLAGS), "folder"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_mpijob``."""
    folder = flags.text("folder", "")
    if not folder and not os.path.isdir(FOLDER):
        raise UsageError(f"no folder is given, and {FOLDER}, which the launcher of every MPIJob has, is not there")
    return local_source(MpiJob(folder or FOLDER, flags.count("slots", 1) if flags.all("slots") else None), flags)
