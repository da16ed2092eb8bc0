"""The hosts whose agents have called this driver: a source of hosts, and a way to start workers on them.

An agent (``edl-hvd join``) calls the driver, so nothing has to find the host, and no ssh server runs there. A host is
there while its agent's connection stands, and for some seconds after it broke, as the agent calls again.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from edl_hvd import agent_channel
from edl_hvd.agent_protocol import FROM_AGENT, AgentHello, AgentRefused, Conversation, JobOver, OpenChannel, greet_agent
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.errors import PlatformError, ProtocolError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

LOST_S = 5.0
# After a broken connection the agent calls again: at once, after half a second, after one second.
_LOOK_EVERY_S = 0.5
_ASK_EVERY_S = 0.01
_MOST_UNAUTHENTICATED = 64
# Silent strangers must not use up the descriptors that agents need.


@dataclass
class _Host:
    """A host as its agent has said. ``sending`` guards ``talk``."""

    entry: HostSlots
    agent: str
    talk: Conversation | None
    sending: threading.Lock = field(default_factory=threading.Lock)
    lost_s: float = 0.0
    gone_s: float | None = None


@dataclass
class _Wanted:
    """A channel that an agent was asked for."""

    came: threading.Event = field(default_factory=threading.Event)
    stream: socket.socket | None = None


class AgentHosts(Source):
    """The agents of one job.

    Args:
        port: To listen on, at every address of this host; 0 takes a free one.
        token: The job's, which agents have to prove.

    Attributes:
        port: On which it listens.
    """

    def __init__(self, port: int, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._hosts: dict[str, _Host] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._has_closed = False
        self._listening: socket.socket | None = None
        self.port = port

    def listen(self) -> None:
        """Begin to listen.

        Raises:
            UsageError: The port cannot be had.
        """
        try:
            self._listening = socket.create_server(("0.0.0.0", self.port), backlog=1024)
        except OSError as error:
            raise UsageError(
                f"--agents-port {self.port} cannot be listened on: {error.strerror}; expected one that is free here"
            ) from error
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listening,), name="edl_hvd agents", daemon=True).start()

    # --- as a source ---

    def answer(self) -> Answer:
        now_s = time.monotonic()
        with self._lock:
            for name, host in list(self._hosts.items()):
                if host.talk is None and (host.gone_s is not None or now_s - host.lost_s > LOST_S):
                    del self._hosts[name]
            hosts = list(self._hosts.values())
        notices = {host.entry.host: max(0.0, host.gone_s - now_s) for host in hosts if host.gone_s is not None}
        return Answer(tuple(host.entry for host in hosts), notices)

    def close(self) -> None:
        """Hang up. Agents call again and again, for a driver that goes on with the job."""
        self._hang_up(None)

    def end_job(self, code: int) -> None:
        """Tell all agents that the job is over, and hang up."""
        self._hang_up(JobOver(code))

    def _hang_up(self, last_word: JobOver | None) -> None:
        with self._lock:
            if self._has_closed:
                return
            self._has_closed = True
            hosts = list(self._hosts.values())
        if self._listening is not None:
            _shut(self._listening)
            self._listening.close()
        for host in hosts:
            if last_word is not None:
                self._say(host, last_word)
            self._drop(host)

    # --- starting workers ---

    def serves(self, host: str) -> bool:
        """Whether workers of this host are started by its agent."""
        with self._lock:
            return host in self._hosts

    def open(self, host: str, command: str, timeout_s: float) -> socket.socket:
        """A channel to a host, behind which a shell runs a command. Blocks.

        Raises:
            PlatformError: There is none in time.
        """
        wanted, name = _Wanted(), secrets.token_hex(16)
        with self._lock:
            self._wanted[name] = wanted
        asked: Conversation | None = None
        began_s = heard_s = time.monotonic()
        try:
            while not wanted.came.wait(_ASK_EVERY_S):
                now_s = time.monotonic()
                talk = self._ask(host, OpenChannel(name, command), asked)
                if talk is not None:
                    asked, heard_s = talk, now_s
                if now_s - heard_s > min(LOST_S, timeout_s):
                    raise PlatformError(f"the agent of host {host} has hung up; see its output")
                if now_s - began_s > timeout_s:
                    raise PlatformError(
                        f"the agent of host {host} opened no connection within {timeout_s:g} s (--start-timeout)"
                    )
            assert wanted.stream is not None
            return wanted.stream
        finally:
            with self._lock:
                self._wanted.pop(name, None)

    def relay_command(self, channel: socket.socket) -> list[str]:
        """The program that takes the place of ssh; it inherits the channel."""
        return [sys.executable, "-I", "-S", agent_channel.__file__, str(channel.fileno())]

    def _ask(self, name: str, message: OpenChannel, asked: Conversation | None) -> Conversation | None:
        """The present connection to an agent, through which it was asked, now or before; ``None``: there is none."""
        with self._lock:
            host = self._hosts.get(name)
        if host is None:
            return None
        talk = host.talk
        return talk if talk is not None and (talk is asked or self._say(host, message)) else None

    def _say(self, host: _Host, message: OpenChannel | JobOver | AgentRefused) -> bool:
        """Whether there is a connection that took it."""
        with host.sending:
            if host.talk is None:
                return False
            try:
                host.talk.say(message)
            except OSError:
                return False
        return True

    def _drop(self, host: _Host) -> None:
        with host.sending:
            if host.talk is not None:
                _shut(host.talk.stream)

    # --- connections ---

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                stream, _ = listening.accept()
            except OSError:
                if self._has_closed:
                    return
                time.sleep(_LOOK_EVERY_S)  # out of descriptors
                continue
            with self._lock:
                if len(self._strangers) >= _MOST_UNAUTHENTICATED:
                    oldest = next(iter(self._strangers))  # the one that has been silent for longest
                    del self._strangers[oldest]
                    _shut(oldest)
                self._strangers[stream] = None
            threading.Thread(target=self._serve, args=(stream,), name="edl_hvd agent", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        keep = False
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_answers(stream)
            talk = Conversation(stream)
            try:
                hello = greet_agent(talk, self._token)
            finally:
                with self._lock:
                    self._strangers.pop(stream, None)
            if hello is not None and hello.channel:
                keep = self._take_channel(hello.channel, stream)
            elif hello is not None:
                self._listen(hello, talk)
        except (OSError, ProtocolError, UsageError):
            pass  # it is gone, or talks nonsense: in both cases there is nobody to tell
        finally:
            if not keep:
                _shut(stream)
                stream.close()

    def _take_channel(self, name: str, stream: socket.socket) -> bool:
        stream.settimeout(None)
        with self._lock:
            wanted = self._wanted.pop(name, None)
            if wanted is None:
                return False
            wanted.stream = stream
        wanted.came.set()
        return True

    def _listen(self, hello: AgentHello, talk: Conversation) -> None:
        host = self._enter(_Host(HostSlots(hello.host, hello.slots), hello.agent, talk))
        try:
            talk.stream.settimeout(_LOOK_EVERY_S)
            while unanswered_s(talk.stream) <= UNANSWERED_S:
                try:
                    leaving = talk.hear(FROM_AGENT)
                except TimeoutError:
                    continue
                with self._lock:
                    host.gone_s = time.monotonic() + leaving.left_s
        finally:
            with host.sending:
                host.talk, host.lost_s = None, time.monotonic()

    def _enter(self, host: _Host) -> _Host:
        """The host is there. Of two agents of one host the later one counts: its host may have been replaced."""
        with self._lock:
            before = self._hosts.get(host.entry.host)
            if self._has_closed:
                raise ConnectionError("this driver ends")
            self._hosts[host.entry.host] = host
        if before is not None and before.agent != host.agent:
            self._say(
                before, AgentRefused(f"another agent has called for host {host.entry.host}; expected one for each")
            )
        if before is not None:
            self._drop(before)
        return host


def _shut(stream: socket.socket) -> None:
    """Wake whoever waits at it."""
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
