"""Agents of hosts: who is believed, what a worker behind one looks like, and how its host comes and goes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from children import CollectedOutput, lives, python
from hypothesis import given
from hypothesis import strategies as st
from waiting import LONG_S, until

from edl_hvd.agent_channel import ERROR, EXIT, HEADER, LARGEST_FRAME_BYTES, OUTPUT, take_frames
from edl_hvd.agent_protocol import AgentHello, Challenge, Conversation, greet_driver
from edl_hvd.cli.join import read_address
from edl_hvd.driver.workers.agents import AgentHosts
from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.process import Exit, WorkerProcess
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import PlatformError, ProtocolError, UsageError
from edl_hvd.host_agent import DriverAddress, HostAgent
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import vocabulary

TOKEN, OTHER = "the-token-of-this-job", "the-token-of-another-job"
B = HostSlots("b", 2)


@pytest.fixture
def hosts() -> Iterator[AgentHosts]:
    made = AgentHosts(0, TOKEN)
    made.listen()
    yield made
    made.close()


class Agent:
    """An agent in a thread of this process."""

    def __init__(self, hosts: AgentHosts, entry: HostSlots = B, token: str = TOKEN, patience_s: float = LONG_S) -> None:
        self.said: list[str] = []
        address = DriverAddress("127.0.0.1", hosts.port)
        environment = {**os.environ, "ON_THE_HOST": "b"}
        self.agent = HostAgent(address, entry, token, environment, patience_s, self.said.append)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.agent.run()

    def ended(self) -> int | None:
        self._thread.join(LONG_S)
        return self.code


@dataclass(frozen=True)
class Ended:
    """A worker that has ended, and what it has printed."""

    exit: Exit
    output: CollectedOutput


async def _nothing(process: WorkerProcess, output: CollectedOutput) -> None:
    """It ends by itself."""


def started(
    hosts: AgentHosts, code: str, follow: Callable[[WorkerProcess, CollectedOutput], Awaitable[None]] = _nothing
) -> Ended:
    """Have the agent of host b start a worker, and wait for its end."""
    output = CollectedOutput()
    program = Program(python(code), {"PATH": os.environ["PATH"], "OF_THE_DRIVER": "yes"}, "/")

    async def run() -> Exit:
        launcher = Launcher(program, Ssh(), lambda host: False, output.take, agents=hosts)
        process = await launcher.start("b:0", {"OF_THE_WORKER": "0"})
        await follow(process, output)
        return await process.wait()

    return Ended(asyncio.run(run()), output)


def test_a_host_is_there_when_its_agent_calls_and_gone_at_once_when_it_leaves(hosts: AgentHosts) -> None:
    assert hosts.answer().hosts == ()
    agent = Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    assert [hosts.serves(name) for name in ("b", "c")] == [True, False]
    agent.agent.leave(30.0)
    until(lambda: hosts.answer().hosts == ())
    assert agent.ended() == 0


def test_a_worker_of_an_agent_writes_reads_and_ends_like_any_other(hosts: AgentHosts) -> None:
    Agent(hosts)
    until(lambda: hosts.serves("b"))
    code = (
        "import os, sys\n"
        "print(os.environ['ON_THE_HOST'], os.environ['OF_THE_DRIVER'], os.environ['OF_THE_WORKER'])\n"
        "sys.stdout.write('x' * 300_000 + '\\n'); print('to stderr', file=sys.stderr)\n"
        "assert sys.stdin.read() == ''\n"
        "sys.exit(7)\n"
    )
    ended = started(hosts, code)
    assert ended.exit == Exit(7, None)
    lines = ended.output.text().split(b"\n")
    assert lines[0] == b"b yes 0"
    assert sum(line.count(b"x") for line in lines) == 300_000
    assert ended.output.text("stderr") == b"to stderr\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_all_processes_of_the_worker(hosts: AgentHosts, number: signal.Signals) -> None:
    Agent(hosts)
    until(lambda: hosts.serves("b"))
    pids = []

    async def end(process: WorkerProcess, output: CollectedOutput) -> None:
        pids.extend([await output.number("worker"), await output.number("child")])
        process.terminate() if number == signal.SIGTERM else process.kill()

    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print('worker', os.getpid(), flush=True); print('child', child.pid, flush=True); time.sleep(1000)\n"
    )
    assert started(hosts, code, end).exit.signal == number
    until(lambda: not any(lives(pid) for pid in pids))


def test_a_worker_that_cannot_be_started_says_why(hosts: AgentHosts) -> None:
    Agent(hosts)
    until(lambda: hosts.serves("b"))

    async def run(program: Program) -> Exit:
        launcher = Launcher(program, Ssh(), lambda host: False, lambda *line: None, agents=hosts)
        return await (await launcher.start("b:0", {})).wait()

    environment = {"PATH": os.environ["PATH"]}
    assert "host b finds no program 'nothing'" in asyncio.run(run(Program(("nothing",), environment, "/"))).text
    assert "no folder '/nowhere'" in asyncio.run(run(Program(("true",), environment, "/nowhere"))).text


def test_an_agent_that_hangs_up_before_a_worker_starts_is_an_error_of_the_start(
    hosts: AgentHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl_hvd.driver.workers.agents.LOST_S", 0.2)
    agent = Agent(hosts)
    until(lambda: hosts.serves("b"))
    agent.agent.leave(0.0)
    agent.ended()
    with pytest.raises(PlatformError, match="agent of host b has hung up"):
        hosts.open("b", "true", 1.0)


def test_a_connection_that_breaks_is_made_again_and_the_host_stays(hosts: AgentHosts) -> None:
    agent = Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    before = hosts._hosts["b"]
    hosts._drop(before)
    until(lambda: hosts._hosts["b"] is not before)
    assert hosts.answer().hosts == (B,)
    assert any("calling again" in line for line in agent.said)


def test_a_driver_that_goes_on_with_the_job_is_called(hosts: AgentHosts) -> None:
    agent = Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    hosts.close()
    following = AgentHosts(hosts.port, TOKEN)
    until(lambda: _listens(following))
    until(lambda: following.answer().hosts == (B,))
    following.end_job(3)
    assert agent.ended() == 1


def _listens(hosts: AgentHosts) -> bool:
    try:
        hosts.listen()
    except PlatformError:
        return False
    return True


@pytest.mark.parametrize(("code", "agents"), [(0, 0), (1, 1)])
def test_an_agent_ends_as_the_job_ends(hosts: AgentHosts, code: int, agents: int) -> None:
    agent = Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    hosts.end_job(code)
    assert agent.ended() == agents


def test_of_two_agents_of_one_host_the_later_one_counts(hosts: AgentHosts) -> None:
    first = Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    Agent(hosts, HostSlots("b", 4))
    assert first.ended() == 1
    assert "another agent has called for host b" in first.said[-1]
    assert hosts.answer().hosts == (HostSlots("b", 4),)


def test_an_agent_with_another_token_is_not_heard(hosts: AgentHosts) -> None:
    agent = Agent(hosts, token=OTHER)
    assert agent.ended() == 1
    assert "does not accept this agent's token" in agent.said[-1]
    assert hosts.answer().hosts == ()


def test_a_driver_with_another_token_runs_nothing_here() -> None:
    """It takes any agent, and tells it what to run."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def pretend() -> None:
            driver = Conversation(theirs)
            driver.say(Challenge(1, "0" * 64))
            driver.hear(vocabulary(AgentHello))
            theirs.sendall(b'{"what": "accepted", "proof": "' + b"0" * 64 + b'"}\n')

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ProtocolError, match="does not hold this agent's token"):
            greet_driver(Conversation(ours), TOKEN, B, "1", "")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100 + b"\n",
        b"[" * 10_000 + b"\n",
        b"x" * 200_000,
        b'{"what": "agenthello", "host": "../b", "slots": 1, "agent": "1", "nonce": "1", "proof": "", "channel": ""}\n',
        b'{"what": "jobover", "code": 0}\n',
    ],
    ids=["nothing", "http", "no text", "deep", "long", "no nonce", "another message"],
)
def test_strangers_are_hung_up_on_and_change_nothing(hosts: AgentHosts, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hosts.port)) as stranger:
        stranger.settimeout(LONG_S)
        stranger.recv(1000)
        with suppress(OSError):  # it hangs up while some is being sent
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # why it is refused
    assert hosts.answer().hosts == ()
    Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))


def test_silent_strangers_keep_no_agent_out(hosts: AgentHosts) -> None:
    silent = [socket.create_connection(("127.0.0.1", hosts.port)) for _ in range(100)]
    Agent(hosts)
    until(lambda: hosts.answer().hosts == (B,))
    assert len(hosts._strangers) <= 64
    for stranger in silent:
        stranger.close()


def test_hosts_that_call_all_at_once_all_belong_to_the_job(hosts: AgentHosts) -> None:
    """More than strangers are listened to at a time: one that is hung up on for another calls again."""
    entries = [HostSlots(f"node-{number}", 1) for number in range(200)]
    agents = [Agent(hosts, entry) for entry in entries]
    until(lambda: set(hosts.answer().hosts) == set(entries))
    hosts.end_job(0)
    assert {agent.ended() for agent in agents} == {0}


def test_a_driver_that_dies_while_it_greets_an_agent_is_called_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dying:
        hosts = AgentHosts(dying.getsockname()[1], TOKEN)
        agent = Agent(hosts)
        stream, _ = dying.accept()
        with stream:
            talk = Conversation(stream)
            talk.say(Challenge(1, "0" * 64))
            talk.hear(vocabulary(AgentHello))
    until(lambda: _listens(hosts))
    until(lambda: hosts.answer().hosts == (B,))
    hosts.end_job(0)
    assert agent.ended() == 0


def test_an_agent_without_a_driver_gives_up_after_its_patience() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        hosts = AgentHosts(taken.getsockname()[1], TOKEN)
        agent = Agent(hosts, patience_s=0.1)
        assert agent.ended() == 1
    assert "gave up after" in agent.said[-1]


def test_a_port_that_is_taken_is_one_sentence(hosts: AgentHosts) -> None:
    with pytest.raises(UsageError, match=f"--agents-port {hosts.port} cannot be listened on"):
        AgentHosts(hosts.port, TOKEN).listen()


FRAMES = st.lists(st.tuples(st.sampled_from([OUTPUT, ERROR, EXIT]), st.binary(max_size=50)))


@given(FRAMES, st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(HEADER.pack(kind, len(content)) + content for kind, content in frames)
    received, found = bytearray(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += stream[:cut]
        stream = stream[cut:]
        found += take_frames(received)
    assert (found, received) == (frames, bytearray())


@pytest.mark.parametrize("begin", [b"z\0\0\0\1", HEADER.pack(OUTPUT, LARGEST_FRAME_BYTES + 1)])
def test_what_is_no_frame_ends_the_channel(begin: bytes) -> None:
    with pytest.raises(ValueError, match="begins no frame"):
        take_frames(bytearray(begin))


@pytest.mark.parametrize("text", ["", "b", "b:", ":1", "b:0", "b:65536", "b:x", "127.0.0.1:22:17077", "b:22:17077"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        read_address(text)


def test_the_command_leaves_at_sigterm(hosts: AgentHosts, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "edl_hvd.cli.main", "join", f"127.0.0.1:{hosts.port}", "--host", "b"]
    agent = subprocess.Popen([*command, "--token-file", str(tmp_path / "token")])
    until(lambda: hosts.serves("b"))
    agent.terminate()
    assert agent.wait(LONG_S) == 0
    until(lambda: hosts.answer().hosts == ())
