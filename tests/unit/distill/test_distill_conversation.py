"""Messages between students and teachers come back as they were, and malformed ones cost no memory."""

from __future__ import annotations

import json
import random
import socket
import tracemalloc

import pytest

from edl_hvd import proof
from edl_hvd.distill import conversation as say
from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits


def malformed(chance: random.Random) -> bytes:
    """A frame with something wrong, mostly."""
    header: dict[str, object] = {"what": "give", "fields": {"number": 1}, "arrays": [["x", "float32", [4, 4]]]}
    line = bytearray(json.dumps(header).encode() + b"\n" + bytes(64))
    for _ in range(chance.randint(1, 8)):
        match chance.randrange(5):
            case 0:
                line[chance.randrange(len(line))] = chance.randrange(256)
            case 1:
                del line[chance.randrange(len(line)) :]
                line += b"\n"
            case 2:
                at = chance.randrange(len(line))
                line[at:at] = chance.randbytes(chance.randint(1, 40))
            case 3:
                at = chance.randrange(len(line))
                line[at:at] = str(chance.randint(-(10**9), 10**18)).encode()
            case _:
                line[:0] = chance.choice([b"{", b"[", b'"', b"\n", b"\x00", b'{"arrays":'])
    return bytes(line)


def receive_all(receiver: FrameStream) -> None:
    while True:
        say.decode(receiver.receive_next(60), say.FROM_STUDENT)


def test_ten_thousand_malformed_frames_take_no_memory():
    chance = random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            one, other = socket.socketpair()
            with one, other:
                receiver = FrameStream(other, Limits(4096, 1024))
                one.sendall(malformed(chance))
                one.close()
                with pytest.raises((ProtocolError, EOFError)):
                    receive_all(receiver)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("message", "known"),
    [
        (say.Nonce(1, "a" * 64), say.NONCE),
        (say.Hello("job", "host:0", (ArrayType("x", "uint8", (3, 8)),), 32, "logits", True), say.FROM_NEW_STUDENT),
        (say.Teaching("h:1:2", "Net", "abc", (ArrayType("logits", "float32", (10,)),), 64), say.FROM_NEW_TEACHER),
        (say.Give(3, 32, False, 2, 1), say.FROM_STUDENT),
        (say.Answer(3, 0.5, 0.25), say.FROM_TEACHER),
        (say.Leaving(), say.FROM_TEACHER),
    ],
)
def test_every_message_comes_back_as_it_was(message, known):
    frame = say.encode(message)
    assert say.decode(Frame(frame.what, json.loads(json.dumps(frame.fields))), known) == message


@pytest.mark.parametrize(
    "frame",
    [
        Frame("teaching", {}), Frame("give", {"number": 1}), Frame("forget", {"number": "1"}),
        Frame("have", {"tasks": 1, "lead": 1, "more": 1}),
        Frame("have", {"tasks": 1, "lead": 1}, (Array(ArrayType("x", "uint8", (1,)), b"a"),)),
    ],
)  # fmt: skip
def test_other_messages_are_refused(frame):
    with pytest.raises(ProtocolError):
        say.decode(frame, say.FROM_STUDENT)


def test_a_proof_holds_for_its_token_role_and_nonces_alone():
    ours, theirs = proof.new_nonce(), proof.new_nonce()
    right = proof.prove("token", proof.STUDENT, ours, theirs)
    assert proof.is_proof(right, "token", proof.STUDENT, ours, theirs)
    assert not proof.is_proof(right, "other", proof.STUDENT, ours, theirs)
    assert not proof.is_proof(right, "token", proof.TEACHER, ours, theirs), "or it could be sent back to its maker"
    assert not proof.is_proof(right, "token", proof.STUDENT, proof.new_nonce(), theirs)
    assert not proof.is_proof("ß", "token", proof.STUDENT, ours, theirs)


@pytest.mark.parametrize("token", ["short", "with a space in it", "ünüsual characters", "x" * 15])
def test_a_weak_token_is_refused(token):
    with pytest.raises(UsageError, match="at least 16"):
        proof.check_token(token)
