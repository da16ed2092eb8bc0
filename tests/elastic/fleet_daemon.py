"""A fleet's daemon as a process of its own, whose jobs are real; killed and started again by tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import REPOSITORY, TOKEN, _processes, _send
from waiting import LONG_S, soon, until

from edl_hvd.errors import PlatformError
from edl_hvd.fleet.messages import FleetView, ViewRequest, call, is_served
from edl_hvd.json_values import as_fields

EDL_HVD = str(Path(sys.executable).with_name("edl-hvd"))
POLL_S = 0.05


class FleetDaemon:
    """A daemon; use it as a context manager, which leaves no process of it or of its jobs behind.

    Args:
        folder: Folder for the state and the hosts file.
        hosts: Content of the hosts file.
        flags: More flags of ``edl-hvd fleet serve``.
        state: Name of the folder of the state.
    """

    def __init__(
        self,
        folder: Path,
        hosts: tuple[str, ...] = ("localhost:4",),
        flags: tuple[str, ...] = (),
        state: str = "fleet",
    ) -> None:
        self.folder = folder
        self.state = folder / state
        self._flags = flags
        self._token = uuid.uuid4().hex
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HOROVOD_", "EDL_HVD_"))}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        self.environment = {**kept, TOKEN: self._token, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
                            "COLUMNS": "200"}  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.write_hosts(*hosts)

    def __enter__(self) -> FleetDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.kill()
            soon(self.process)
        deadline_s = time.monotonic() + LONG_S
        while left := [pid for pid, _ in _processes(self._token)]:
            for pid in left:
                _send(pid, signal.SIGKILL)
            assert time.monotonic() < deadline_s, f"processes {left} of the fleet cannot be ended"
            time.sleep(POLL_S)

    def write_hosts(self, *hosts: str) -> None:
        """Replace the hosts file in one move."""
        part = self.folder / "hosts.part"
        part.write_text("".join(f"{host}\n" for host in hosts))
        part.replace(self.folder / "hosts")

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        with open(self.folder / "daemon.log", "ab") as log:
            self.process = subprocess.Popen(
                [EDL_HVD, "fleet", "serve", "--discover", f"file:{self.folder / 'hosts'}", "--state", str(self.state),
                 *self._flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.until(lambda: is_served(self.state))

    def kill(self) -> None:
        """Kill the daemon as a machine that runs out of memory would."""
        assert self.process is not None
        self.process.kill()
        soon(self.process)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``edl-hvd fleet WORDS``; ``--state`` is added before a command of its own."""
        split = words.index("--") if "--" in words else len(words)
        whole = [EDL_HVD, "fleet", *words[:split], "--state", str(self.state), *words[split:]]
        return subprocess.run(whole, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False)

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line as a user types it in the daemon's folder."""
        path = f"{Path(EDL_HVD).parent}:{self.environment['PATH']}"
        return subprocess.run(
            ["sh", "-c", line], env={**self.environment, "PATH": path}, cwd=self.folder, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    def submit(self, name: str, *flags: str, command: tuple[str, ...]) -> None:
        """Submit a job."""
        done = self.ask("submit", "--name", name, *flags, "--", *command)
        assert done.returncode == 0, done.stderr

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs by name, as ``list --json`` shows them: the fields of the job and its progress.

        The daemon is asked from here: tests look many times a second, and a command takes a third of one.
        """
        try:
            view = call(self.state, ViewRequest())
        except PlatformError as error:
            raise AssertionError((self.folder / "daemon.log").read_text()) from error
        assert isinstance(view, FleetView)
        return {row["job"]["spec"]["name"]: {**row["job"], "progress": row["progress"]}
                for row in json.loads(json.dumps(as_fields(view)))["jobs"]}  # fmt: skip

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        assert self.process is not None
        until(holds, self._why_it_ended, POLL_S)

    def _why_it_ended(self) -> str | None:
        assert self.process is not None
        return None if self.process.poll() is None else (self.folder / "daemon.log").read_text()

    def edlruns(self) -> dict[str, list[int]]:
        """Process numbers of living ``edlrun``s, by job."""
        found: dict[str, list[int]] = {}
        for pid, line in _processes(self._token):
            if "edl_hvd.cli.edlrun" in line and "--job-dir" in line:
                words = line.split()
                found.setdefault(Path(words[words.index("--job-dir") + 1]).name, []).append(pid)
        return found
