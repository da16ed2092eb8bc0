"""Hosts that are reached by ssh, on this machine.

Horovod calls a host local when its address belongs to a network interface. 127.0.0.1 does; 127.0.0.2 and its
neighbours reach the same machine but do not, so workers there are started with ssh, as on any other host. Server,
keys and configuration are of a test's own: nothing in ``~/.ssh`` or ``/etc/ssh`` is read or written.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import harness

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# Servers are often on root's path only.
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
# A server that runs as root wants this folder, which the system's service makes when it starts.
SEPARATION_FOLDER = Path("/run/sshd")
START_TIMEOUT_S = 60.0


class SshServer:
    """An sshd for ``HOSTS`` and an ``ssh`` that knows its port and key; see ``serve``.

    Attributes:
        tools: Folder with that ``ssh``, to be put first into ``PATH``.
    """

    def __init__(self, folder: Path) -> None:
        self.tools = folder / "tools"
        self._folder = folder
        self._log = folder / "sshd.log"

    def logins(self) -> list[str]:
        """Host of each login with the test's key, in order of time."""
        text = self._log.read_text(errors="replace")
        host_of_port = dict(re.findall(r"Connection from \S+ port (\d+) on (\S+) port", text))
        return [host_of_port[port] for port in re.findall(r"Accepted publickey for \S+ from \S+ port (\d+)", text)]

    def start(self) -> subprocess.Popen[bytes]:
        assert SSHD is not None
        assert SSH is not None
        port = _free_port()
        for name in ("host_key", "user_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self._folder / name)]
            subprocess.run(keygen, check=True)
        self._write("sshd_config", SERVER.format(folder=self._folder, port=port) + "".join(
            f"ListenAddress {host}\n" for host in HOSTS))  # fmt: skip
        self._write("ssh_config", CLIENT.format(folder=self._folder, port=port))
        self.tools.mkdir()
        self._write("tools/ssh", f'#!/bin/sh\nexec {SSH} -F {self._folder}/ssh_config "$@"\n').chmod(0o755)
        command = [SSHD, "-D", "-f", str(self._folder / "sshd_config"), "-E", str(self._log)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=harness._end_with_parent)
        try:
            self._wait_for_login(server)
        except BaseException:
            server.kill()
            server.wait()
            raise
        return server

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text)
        return path

    def _wait_for_login(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            attempt = [str(self.tools / "ssh"), "-o", "StrictHostKeyChecking=no", HOSTS[-1], "true"]
            done = subprocess.run(attempt, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return
            if server.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace") if self._log.exists() else ""
                raise RuntimeError(f"the test's sshd lets nobody in: {done.stderr}\n{log}")
            time.sleep(0.1)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[SshServer]:
    """A server on ``HOSTS`` with files in ``folder``; it and its sessions end with the block."""
    if os.geteuid() == 0:
        # It stays: the server of another test process may need it by now.
        SEPARATION_FOLDER.mkdir(mode=0o755, exist_ok=True)
    hosts = SshServer(folder)
    server = hosts.start()
    try:
        yield hosts
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        return int(probe.getsockname()[1])


SERVER = f"""\
Port {{port}}
HostKey {{folder}}/host_key
AuthorizedKeysFile {{folder}}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowUsers {getpass.getuser()}
LogLevel VERBOSE
"""

CLIENT = """\
Port {port}
IdentityFile {folder}/user_key
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
LogLevel ERROR
"""
