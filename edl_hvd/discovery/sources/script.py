"""Hosts that a command of the user prints."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from typing import IO

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host

LONGEST_ANSWER_BYTES = 1 << 20
# Ten thousand hosts with long names; a longer output is something else.
STDERR_CHARACTERS = 400
# Some lines of a terminal, from the end, which says most in a message or a traceback.
LOOK_S = 0.02
# Seconds. The end of a script closes its pipes, which is seen at once; this is for one that leaves a child behind.


class Script(Source):
    """The hosts that a command prints, one ``host`` or ``host:slots`` line each; it runs at each request.

    A shell runs the command, as with Horovod, so it may have arguments, variables and pipes. Output without a host is
    an error, as an exit code other than 0: a pipe whose first command fails prints nothing, which Horovod reads as
    "every host is gone".

    Args:
        command: Command line for the shell.
        default_slots: Number of slots of a host that names none; ``None`` if each line has to name them, so that no
            other word counts as a host.
        timeout_s: Seconds after which the command and its children are killed.
        clock: Clock of the timeout.
    """

    def __init__(
        self,
        command: str,
        default_slots: int | None = None,
        timeout_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._command = command
        self._default_slots = default_slots
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = False

    def answer(self) -> Answer:
        """Run the command; blocks up to ``timeout_s``.

        Raises:
            DiscoveryError: The command did not start, failed, took too long, printed nothing or no host; or ``close``
                was called. The end of its standard error is in the message.
        """
        process = self._start()
        output = _Output()
        try:
            self._listen(process, output)
        finally:
            self._kill(process)
            process.wait()
            for pipe in _pipes(process):
                pipe.close()
        if process.returncode:
            raise DiscoveryError(f"{self._name()} {_describe_end(process.returncode)}{output.last_words()}")
        return Answer(self._parse(output))

    def close(self) -> None:
        """Kill the command if it runs, and do not run it again. Does not block; any thread may call it."""
        with self._lock:
            self._closed = True
            running = self._running
        if running is not None:
            self._kill(running)

    def _name(self) -> str:
        return f"the discovery script {self._command!r}"

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise DiscoveryError(f"{self._name()} was not run, because the job is ending")
            try:
                self._running = subprocess.Popen(
                    self._command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # a process group of its own, to kill it as a whole, and without Ctrl-C
                )
            except (OSError, ValueError) as error:
                raise DiscoveryError(f"{self._name()} cannot be started: {error}") from error
            return self._running

    def _listen(self, process: subprocess.Popen[bytes], output: _Output) -> None:
        """Read until the command has ended, without waiting for children that it left in the background.

        Raises:
            DiscoveryError: The command takes too long, or prints too much.
        """
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for pipe, kept in zip(_pipes(process), (output.stdout, output.stderr), strict=True):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, kept)
            while True:
                ended = self._has_ended(process)  # before reading, so that all its output is in the pipe
                readable = selector.select(0 if ended else LOOK_S)
                for key, _ in readable:
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    key.data.extend(chunk)
                if len(output.stdout) > LONGEST_ANSWER_BYTES:
                    raise DiscoveryError(f"{self._name()} printed more than {LONGEST_ANSWER_BYTES} bytes; {_FORM}")
                del output.stderr[: -4 * STDERR_CHARACTERS]  # a character has at most four bytes
                if ended and not readable:
                    return
                if self._clock.monotonic_s() > deadline_s:
                    raise DiscoveryError(
                        f"{self._name()} did not end within {self._timeout_s:g} s and was killed; it should answer "
                        f"within a second, if need be with what it knew last{output.last_words()}"
                    )

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        with self._lock:  # after the end its process id may belong to another process
            return process.poll() is not None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _parse(self, output: _Output) -> tuple[HostSlots, ...]:
        try:
            lines = output.stdout.decode().splitlines()
        except UnicodeDecodeError as error:
            raise DiscoveryError(f"{self._name()} printed something that is not text: {error}; {_FORM}") from error
        found: dict[str, HostSlots] = {}
        for line in filter(str.strip, lines):
            try:
                host = self._parse_line(line)
            except UsageError as error:
                raise DiscoveryError(
                    f"{self._name()} printed something that is not a host: {error}{output.last_words()}"
                ) from error
            if found.setdefault(host.host, host) != host:
                raise DiscoveryError(f"{self._name()} printed {host.host} twice, with different slots; {_FORM}")
        if not found:
            raise DiscoveryError(
                f"{self._name()} printed no host and ended with exit code 0, which counts as a fault, not as "
                f"an empty fleet; exit with another code while it has no hosts to print{output.last_words()}"
            )
        return tuple(found.values())

    def _parse_line(self, line: str) -> HostSlots:
        host = parse_host(line, self._default_slots or 1)
        if self._default_slots is None and ":" not in line:
            raise UsageError(f"{line.strip()!r} names no slots; expected 'host:slots', or --slots-per-host to be given")
        return host


_FORM = "expected one 'host:slots' line per host and nothing else"


@dataclass
class _Output:
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def last_words(self) -> str:
        """The end of standard error, as the end of a sentence on one line; empty if there is none."""
        words = " ".join(self.stderr.decode(errors="replace").split())
        cut = "... " if len(words) > STDERR_CHARACTERS else ""
        return f": {cut}{words[-STDERR_CHARACTERS:]}" if words else ""


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout, process.stderr


def _describe_end(returncode: int) -> str:
    if returncode > 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
