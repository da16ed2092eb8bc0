"""What a driver and the agents of its hosts say to each other, and how both prove that they hold the job's token.

An agent calls. Of its first connection both sides keep hold: it says that the host is there. When the driver wants a
worker there it asks for a **channel**, a second connection that the agent opens, see ``agent_channel.py``. Each
connection begins with three lines, before which neither side believes anything:

    driver   Challenge    its nonce
    agent    AgentHello   host, slots, its nonce and its proof
    driver   Accepted     its proof; or AgentRefused, and why

Nothing is encrypted, as between workers: the network between the hosts has to be the job's own, or encrypt itself.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from edl_hvd import proof
from edl_hvd.errors import ProtocolError
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import Message, MessageT, Vocabulary, decode, encode, vocabulary

VERSION = 1
LONGEST_LINE_BYTES = 1 << 16
HELLO_TIMEOUT_S = 10.0
# For each line of the beginning.


@dataclass(frozen=True)
class Challenge(Message):
    """The driver's first line."""

    version: int
    nonce: str


@dataclass(frozen=True)
class AgentHello(Message):
    """The agent's answer.

    Attributes:
        host: Address or name at which the other hosts reach this one.
        slots: Workers that it may run.
        agent: Number of the agent's process, chosen at random.
        nonce: Nonce of the agent.
        proof: Proof that it holds the token.
        channel: Channel that this connection is; empty for the first one.
    """

    host: str
    slots: int
    agent: str
    nonce: str
    proof: str = field(repr=False)
    channel: str = ""


@dataclass(frozen=True)
class Accepted(Message):
    """The driver holds the token, too."""

    proof: str = field(repr=False)


@dataclass(frozen=True)
class AgentRefused(Message):
    """The agent is not wanted, and ends. An agent whose connection breaks without this word calls again."""

    reason: str


@dataclass(frozen=True)
class OpenChannel(Message):
    """The agent is to open a channel, and to run a command of the shell behind it."""

    channel: str
    command: str


@dataclass(frozen=True)
class JobOver(Message):
    """The job is over, with this exit code; the agent ends."""

    code: int


@dataclass(frozen=True)
class HostLeaving(Message):
    """The host will be gone in this number of seconds; its workers should leave now."""

    left_s: float


CHALLENGE: Vocabulary[Challenge] = vocabulary(Challenge)
HELLO: Vocabulary[AgentHello] = vocabulary(AgentHello)
ANSWER: Vocabulary[Accepted | AgentRefused] = vocabulary(Accepted, AgentRefused)
FROM_DRIVER: Vocabulary[OpenChannel | JobOver | AgentRefused] = vocabulary(OpenChannel, JobOver, AgentRefused)
FROM_AGENT: Vocabulary[HostLeaving] = vocabulary(HostLeaving)


class Conversation:
    """Messages on one connection, both ways.

    Args:
        stream: The connection; its timeout holds for each call.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._begun = bytearray()

    def say(self, message: Message) -> None:
        """Send one message. Blocks.

        Raises:
            OSError: The connection is broken.
        """
        self.stream.sendall(encode(message))

    def hear(self, known: Vocabulary[MessageT]) -> MessageT:
        """The next message, and not a byte of what follows it. Blocks.

        Raises:
            TimeoutError: It is not there yet; the next call goes on with what has come of it.
            ConnectionError: The other side has closed.
            OSError: The connection is broken.
            ProtocolError: It is no known message.
        """
        while not self._begun.endswith(b"\n"):
            if len(self._begun) >= LONGEST_LINE_BYTES:
                raise ProtocolError(f"a line of more than {LONGEST_LINE_BYTES} bytes is no message")
            byte = self.stream.recv(1)
            if not byte:
                raise ConnectionError("the other side has closed the connection")
            self._begun += byte
        line, self._begun = bytes(self._begun), bytearray()
        return decode(line, known)


def greet_agent(agent: Conversation, token: str) -> AgentHello | None:
    """The driver's side of the beginning, up to the agent's proof; ``None`` if it is wrong.

    Raises:
        OSError, ProtocolError: See ``Conversation.hear``.
    """
    agent.stream.settimeout(HELLO_TIMEOUT_S)
    nonce = proof.new_nonce()
    agent.say(Challenge(VERSION, nonce))
    hello = agent.hear(HELLO)
    if not proof.is_nonce(hello.nonce) or not proof.is_proof(hello.proof, token, proof.AGENT, hello.nonce, nonce):
        agent.say(AgentRefused("the driver does not accept this agent's token; expected the same token file"))
        return None
    agent.say(Accepted(proof.prove(token, proof.DRIVER, nonce, hello.nonce)))
    return hello


def greet_driver(driver: Conversation, token: str, entry: HostSlots, agent: str, channel: str) -> None:
    """The agent's side of the beginning; the arguments after the token are the fields of ``AgentHello``.

    Raises:
        OSError: See ``Conversation.hear``.
        ProtocolError: The driver holds another token, is of another version, or does not want this agent.
    """
    driver.stream.settimeout(HELLO_TIMEOUT_S)
    challenge = driver.hear(CHALLENGE)
    if challenge.version != VERSION or not proof.is_nonce(challenge.nonce):
        raise ProtocolError(
            f"the driver speaks version {challenge.version} of the agents' protocol; expected {VERSION}: use the same "
            "edl_hvd on all hosts"
        )
    nonce = proof.new_nonce()
    mine = proof.prove(token, proof.AGENT, nonce, challenge.nonce)
    driver.say(AgentHello(entry.host, entry.slots, agent, nonce, mine, channel))
    answer = driver.hear(ANSWER)
    if isinstance(answer, AgentRefused):
        raise ProtocolError(answer.reason)
    if not proof.is_proof(answer.proof, token, proof.DRIVER, challenge.nonce, nonce):
        raise ProtocolError("the driver does not hold this agent's token, so nothing of it is run here")
