"""Three hosts and the driver's on this machine, each behind a network cable that a test can pull out of the switch.

::

    driver  dock0 172.31.0.1  eth0 10.90.0.1  ──┐
    h1      back0 172.31.0.1  eth0 10.90.0.11 ──┤
    h2      back0 172.31.0.1  eth0 10.90.0.12 ──┤ switch
    h3      back0 172.31.0.1  eth0 10.90.0.13 ──┘

A host is a tree of processes in namespaces of its own: network, process numbers, host name and mounts. Only the files
are shared, as on hosts with a network file system. Each has an sshd, and a second network, listed first, that leads
nowhere and has the same address everywhere, as Docker's does; its own name means that address, which happens too.
The driver's host knows h1 and h2 by name, and h3 by its ssh configuration alone.

The namespaces have no names under ``/run/netns``: one without a name ends with its last process, so there is nothing
that a killed test could leave behind. This machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from ssh_hosts import CLIENT, SEPARATION_FOLDER, SERVER, SSH, SSHD

NAMES = ("h1", "h2", "h3")
ADDRESSES = {"driver": "10.90.0.1", "h1": "10.90.0.11", "h2": "10.90.0.12", "h3": "10.90.0.13"}
NOWHERE = "172.31.0.1"
# Of no host: what is sent there stays unanswered.
NOBODY = "10.90.0.99"

NAMESPACES = ["unshare", "--net", "--uts", "--mount"]
# Killing the first process of such a tree ends all of it.
TREE = ["--pid", "--fork", "--kill-child", "--mount-proc"]
_SWITCH = """
set -e
ip link add switch type bridge
ip link set switch up
echo up
exec sleep infinity
"""
_HOST = f"""
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
ip link set lo up
ip link add "$3" type veth peer name nowhere
ip address add {NOWHERE}/24 dev "$3"
ip link set nowhere up
ip link set "$3" up
echo up
read -r plugged
ip address add "$4/24" dev eth0
ip link set eth0 up
shift 4
echo ready
exec "$@"
"""


@functools.cache
def missing() -> str:
    """What this machine lacks; empty if all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"no program {program!r} on this machine (apt-get install {package})"
    if SSHD is None or SSH is None:
        return "no ssh server on this machine (apt-get install openssh-server)"
    needed = "hostname test; ip link add test0 type veth; ip link add test1 type bridge"
    attempt = [*NAMESPACES, *TREE, "sh", "-ec", needed]
    done = subprocess.run(attempt, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return f"this machine permits no network namespaces: {done.stderr.strip()}" if done.returncode else ""


class Namespace:
    """A process in a network of its own, with all that it starts; ends with :meth:`end`."""

    def __init__(self, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._expect(b"up\n")

    @property
    def pid(self) -> int:
        """Of its first process, as this machine numbers it."""
        return self._process.pid

    def words(self, *command: str, folder: Path = Path("/")) -> list[str]:
        """The command that runs ``command`` there, in that folder, with this machine's process numbers."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]
        return [*enter, "env", f"--chdir={folder}", *command]

    def run(self, *command: str) -> str:
        """Run a command there; its output. Raises ``CalledProcessError``."""
        return subprocess.run(self.words(*command), check=True, stdout=subprocess.PIPE, text=True).stdout

    def end(self) -> None:
        """End it; with its last process goes its network."""
        self._process.kill()
        self._process.communicate()

    def _expect(self, line: bytes) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != line:
            self.end()
            raise RuntimeError("a namespace could not be made; its error is above")


class Host(Namespace):
    """A host; what it runs besides begins when it is connected.

    Args:
        name: Its host name, and that in ``ADDRESSES``.
        folder: For its files.
        nowhere: Name of the network interface that leads nowhere.
        tree: Give it process numbers of its own, and end all its processes with it.
        command: What it runs.
    """

    def __init__(self, name: str, folder: Path, nowhere: str, tree: bool, command: Sequence[str]) -> None:
        self._tree = tree
        self._address = ADDRESSES[name]
        names = {**{known: ADDRESSES[known] for known in ("driver", "h1", "h2")}, name: NOWHERE}
        hosts = folder / f"hosts.{name}"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{names[known]} {known}\n" for known in names))
        words = [*NAMESPACES, *(TREE if tree else ()), "sh", "-c", _HOST, "sh", name, str(hosts), nowhere]
        super().__init__([*words, self._address, *command])

    @property
    def pid(self) -> int:
        return int(psutil.Process(self._process.pid).children()[0].pid) if self._tree else self._process.pid

    def plug_in(self) -> None:
        """There is an interface ``eth0`` now: go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"plugged\n")
        self._process.stdin.flush()
        self._expect(b"ready\n")

    def kill_sessions(self) -> None:
        """Kill the ssh server's children, one per login."""
        sessions = [child for child in psutil.Process(self.pid).children() if child.name().startswith("sshd")]
        assert sessions
        for session in sessions:
            session.kill()


class Network:
    """Hosts ``h1``, ``h2``, ``h3`` and the driver's; see the module.

    Attributes:
        folder: Of its files, ``ssh_config`` among them.
        tools: Folder with an ``ssh`` that has the key, to be put first into ``PATH``.
        hosts: By name.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.hosts: dict[str, Host] = {}
        # An sshd of root's wants this folder. It stays: that of another test process may need it by now.
        SEPARATION_FOLDER.mkdir(mode=0o755, exist_ok=True)
        self._write_configuration()
        self._switch = Namespace([*NAMESPACES, "sh", "-c", _SWITCH])
        stack.callback(self._switch.end)
        assert SSHD is not None
        self._add(stack, Host("driver", folder, "dock0", False, ["sleep", "infinity"]), "driver")
        for name in NAMES:
            server = [SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / f"sshd.{name}.log")]
            self._add(stack, Host(name, folder, "back0", True, server), name)

    @property
    def driver(self) -> Host:
        return self.hosts["driver"]

    def cut(self, name: str) -> None:
        """Pull the host's cable out of the switch: nobody hears anything from it, nor is told so."""
        self._switch.run("ip", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        self._switch.run("ip", "link", "set", name, "up")

    def disturb(self, name: str, seconds: float) -> float:
        """Pull the host's cable out of the switch and put it back; for how long it was out, at most."""
        began_s = time.monotonic()
        self._switch.run("sh", "-c", f"ip link set {name} down && sleep {seconds} && ip link set {name} up")
        return time.monotonic() - began_s

    def log_in(self) -> None:
        """Wait until every host lets the driver in."""
        for name in NAMES:
            ssh = [str(self.tools / "ssh"), "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectionAttempts=50"]
            self.driver.run(*ssh, name, "true")

    def _add(self, stack: contextlib.ExitStack, host: Host, name: str) -> None:
        stack.callback(host.end)
        self.hosts[name] = host
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self._switch.run("ip", "link", "add", name, *cable)
        self._switch.run("ip", "link", "set", name, "master", "switch", "up")
        host.plug_in()

    def _write_configuration(self) -> None:
        for name in ("host_key", "user_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.folder / name)]
            subprocess.run(keygen, check=True)
        (self.folder / "sshd_config").write_text(SERVER.format(folder=self.folder, port=22))
        only_here = f"Host h3\nHostName {ADDRESSES['h3']}\n"
        (self.folder / "ssh_config").write_text(CLIENT.format(folder=self.folder, port=22) + only_here)
        self.tools.mkdir()
        (self.tools / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {self.folder}/ssh_config "$@"\n')
        (self.tools / "ssh").chmod(0o755)


@contextlib.contextmanager
def connect(folder: Path) -> Iterator[Network]:
    """The network with all its hosts, with files in ``folder``; ends with the block, and with this process."""
    with contextlib.ExitStack() as stack:
        network = Network(folder, stack)
        network.log_in()
        yield network


def _die_with_parent() -> None:
    """In a child before it starts: it does not outlive the tests (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
