"""The agent of a host: it calls the driver of a job, and starts workers when it is told to; ``edl-hvd join``.

It does for a driver what an ssh server does, the other way round: the host calls. So a host needs no ssh server, no
keys and no name, and a job needs nobody who lists its hosts. Workers outlive their agent's connection, as they outlive
that of ssh: a worker whose driver is gone saves and ends by itself.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from edl_hvd.agent_channel import ERROR, EXIT, OUTPUT, send_frame
from edl_hvd.agent_protocol import (
    FROM_DRIVER,
    AgentRefused,
    Conversation,
    HostLeaving,
    JobOver,
    OpenChannel,
    greet_driver,
)
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import ProtocolError
from edl_hvd.hosts import HostSlots
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s
from edl_hvd.time_slice import ask_for_short_time_slices

SUCCESS, FAILED = 0, 1
_CALL_AGAIN_S = (0.0, 0.5, 1.0, 2.0)
_LOOK_EVERY_S = 0.5
_READ_BYTES = 1 << 16
_CONNECT_S = 5.0


@dataclass(frozen=True)
class DriverAddress:
    """Where a driver listens for agents."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HostAgent:
    """Calls a driver until the job ends.

    Args:
        driver: Whom to call.
        entry: This host, as the other hosts reach it, and its slots.
        token: The job's.
        environment: For the workers, under what the driver sends.
        patience_s: Longest time without a driver.
        tell: Told what people want to know.
    """

    def __init__(
        self,
        driver: DriverAddress,
        entry: HostSlots,
        token: str,
        environment: Mapping[str, str],
        patience_s: float,
        tell: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._driver, self._entry, self._token = driver, entry, token
        self._environment, self._patience_s, self._tell, self._clock = dict(environment), patience_s, tell, clock
        self._number = secrets.token_hex(8)
        self._sending = threading.Lock()
        self._talk: Conversation | None = None
        self._idle = threading.Condition()
        self._workers = 0
        self._left_until_s: float | None = None
        self._is_over = threading.Event()

    def run(self) -> int:
        """Call, and start workers. Blocks until the job ends, or this host leaves it.

        Returns:
            0 if the job ended well or this host has left, 1 if the job failed, or no driver wants this agent.
        """
        ask_for_short_time_slices()
        tries, since_s, said = 0, self._clock.monotonic_s(), ""
        while not self._is_over.wait(_CALL_AGAIN_S[min(tries, len(_CALL_AGAIN_S) - 1)]):
            try:
                talk = self._call("")
            except ProtocolError as error:
                self._tell(f"the driver at {self._driver} and this agent do not come together: {error}")
                return FAILED
            except OSError as error:
                tries += 1
                waited_s = self._clock.monotonic_s() - since_s
                if waited_s > self._patience_s:
                    self._tell(f"gave up after {waited_s:.0f} s: {self._driver} cannot be reached: {error}")
                    return FAILED
                if tries > 1 and said != (said := str(error)):
                    self._tell(f"{self._driver} cannot be reached: {error}; calling again")
                continue
            tries, said = 0, ""
            self._tell(f"{self._entry} belongs to the job of {self._driver}")
            ended = self._listen(talk)
            if ended is not None:
                return ended
            since_s = self._clock.monotonic_s()
        return SUCCESS

    def leave(self, left_s: float) -> None:
        """Tell the driver that this host goes; ``run`` returns when its workers have ended, or after that time."""
        self._left_until_s = self._clock.monotonic_s() + left_s
        with self._sending, suppress(OSError):
            if self._talk is not None:
                self._talk.say(HostLeaving(left_s))
        threading.Thread(target=self._end_when_idle, args=(left_s,), daemon=True).start()

    def _end_when_idle(self, left_s: float) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._workers, left_s)
        self._is_over.set()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._sending, suppress(OSError):
            if self._talk is not None:
                self._talk.stream.shutdown(socket.SHUT_RDWR)

    def _call(self, channel: str) -> Conversation:
        """A connection that both sides trust."""
        stream = socket.create_connection((self._driver.host, self._driver.port), timeout=_CONNECT_S)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_answers(stream)
            talk = Conversation(stream)
            greet_driver(talk, self._token, self._entry, self._number, channel)
        except BaseException:
            stream.close()
            raise
        return talk

    def _listen(self, talk: Conversation) -> int | None:
        """Do what the driver says, until it hangs up; the exit code if the job is over for this agent."""
        with self._sending:
            self._talk = talk
        with talk.stream as stream:
            stream.settimeout(_LOOK_EVERY_S)
            if self._left_until_s is not None:
                self.leave(max(0.0, self._left_until_s - self._clock.monotonic_s()))
            try:
                while unanswered_s(stream) <= UNANSWERED_S:
                    try:
                        message = talk.hear(FROM_DRIVER)
                    except TimeoutError:
                        continue
                    match message:
                        case OpenChannel(channel, command):
                            threading.Thread(target=self._serve, args=(channel, command), daemon=True).start()
                        case JobOver(code):
                            return SUCCESS if code == 0 else FAILED
                        case AgentRefused(reason):
                            self._tell(reason)
                            return FAILED
            except (OSError, ProtocolError) as error:
                if not self._is_over.is_set():
                    self._tell(f"the connection to {self._driver} broke: {error}; calling again")
            finally:
                with self._sending:
                    self._talk = None
        return SUCCESS if self._is_over.is_set() else None

    def _serve(self, channel: str, command: str) -> None:
        """One worker's supervisor, from its start to its end."""
        with self._idle:
            self._workers += 1
        try:
            with self._call(channel).stream as stream:
                stream.settimeout(None)
                self._run(stream, command)
        except (OSError, ProtocolError) as error:
            self._tell(f"a worker could not be started: {error}")
        finally:
            with self._idle:
                self._workers -= 1
                self._idle.notify_all()

    def _run(self, stream: socket.socket, command: str) -> None:
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        sending = threading.Lock()

        def pass_input() -> None:
            assert process.stdin is not None
            with process.stdin, suppress(OSError):  # the driver is gone, or the supervisor
                while data := stream.recv(_READ_BYTES):
                    process.stdin.write(data)

        def pass_output(kind: bytes, output: IO[bytes]) -> None:
            with output:
                while data := output.read(_READ_BYTES):
                    with sending:
                        try:
                            send_frame(stream, kind, data)
                        except OSError:
                            return  # closed, as by an ssh server that has lost its client

        outputs = [
            threading.Thread(target=pass_output, args=pair, daemon=True)
            for pair in ((OUTPUT, process.stdout), (ERROR, process.stderr))
        ]
        threading.Thread(target=pass_input, daemon=True).start()
        for thread in outputs:
            thread.start()
        code = process.wait()
        for thread in outputs:
            thread.join()
        with suppress(OSError):
            send_frame(stream, EXIT, str(code if code >= 0 else 128 - code).encode())
            stream.shutdown(socket.SHUT_RDWR)  # wakes who waits for more input
