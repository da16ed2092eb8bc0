"""The demo's stage: a launcher on this machine, with a list of hosts that changes while it runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from demos import Stage, StageError, program
from script import Scene

from edl_hvd.errors import PlatformError
from edl_hvd.hosts import HostSlots, format_hosts

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12


class HostStage(Stage):
    """Stage of an elastic job on two "hosts" of this machine, on which scenes are performed.

    Args:
        folder: Folder for the host list and the job's output.
        hosts: Names of the hosts at the start, one slot each.
        launcher: "edlrun" or "horovodrun".
    """

    def __init__(self, folder: Path, hosts: Sequence[str], launcher: str) -> None:
        super().__init__(folder)
        self._launcher = launcher
        self._hosts_file = folder / "hosts"
        self._hosts = list(hosts)
        self._write_hosts()

    @property
    def output(self) -> Path:
        """The file with what the job has printed."""
        return self.log(self._launcher)

    def start_job(self, command: Sequence[str]) -> None:
        """Start ``command`` under the launcher with one to two workers."""
        launcher = [program(self._launcher), "-np", "1", "--min-np", "1", "--max-np", "2"]
        if self._launcher == "edlrun":
            launcher += ["--discover", f"file:{self._hosts_file}"]
        else:
            discovery = [str(ROOT / "discovery_scripts" / "from_file"), str(self._hosts_file)]
            launcher += [
                # One machine: without the interface, Horovod waits for two hosts to compare theirs.
                "--network-interfaces", loopback_interface(),
                "--host-discovery-script", shlex.join(discovery),
                # A host whose worker died may return: the first time after two to three times the lower bound, in s.
                "--blacklist-cooldown-range", "1", "10",
            ]  # fmt: skip
        self.start(self._launcher, [*launcher, *command], EDL_HVD_PYTHON=sys.executable)

    def exit_code(self) -> int | None:
        """The exit code of the launcher; ``None`` while it runs."""
        return self.processes[self._launcher].poll()

    def perform(self, scene: Scene, pids: dict[str, int]) -> None:
        """Perform a scene.

        Args:
            scene: The scene.
            pids: Process id of the newest worker of each host.
        """
        if scene.action == "add":
            self._hosts.append(scene.host)
        else:
            self._hosts.remove(scene.host)
        if scene.action == "kill":
            self._kill(pids[scene.host])
        self._write_hosts()

    def last_words(self) -> str:
        """The last lines that workers printed; those of the launcher if there are none."""
        lines = self.output.read_text(errors="replace").splitlines()
        of_workers = [line for line in lines if re.match(r"\[\d+\]<", line)]
        return "\n".join((of_workers or lines)[-LAST_LINES:])

    def _kill(self, pid: int) -> None:
        """Send SIGKILL to a process of this job only: a process id from a log may be in use by another program."""
        for process in psutil.Process(self.processes[self._launcher].pid).children(recursive=True):
            if process.pid == pid:
                return process.kill()
        raise StageError(f"cannot kill worker {pid}: it is no process of this job any more; see {self.output}")

    def _write_hosts(self) -> None:
        scratch = self._hosts_file.with_suffix(".new")
        scratch.write_text(format_hosts(HostSlots(host, 1) for host in self._hosts))
        scratch.rename(self._hosts_file)  # the discovery script reads the old list or the new one, never a part


def loopback_interface() -> str:
    """Name of the network interface that carries 127.0.0.1: "lo" on Linux, "lo0" on macOS."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise PlatformError("cannot find the network interface of 127.0.0.1; expected one, named lo on most machines")
