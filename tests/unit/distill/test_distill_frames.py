"""Frames arrive as they were sent, however they are cut, and what is no frame costs no memory."""

from __future__ import annotations

import json
import random
import socket
import tracemalloc

import pytest
import torch

from edl_hvd import proof
from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.distill import conversation as say
from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frames import Array, ArrayType, Frame, FrameStream, Limits

EMPTY = Array(ArrayType("y", "bool", (0,)), b"")
LARGE = Limits(1 << 16, 1 << 24)


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def receive(stream: FrameStream) -> Frame:
    while True:
        frame = stream.receive()
        if frame is not None:
            return frame


def test_frames_arrive_as_they_were_sent(ends):
    sender, receiver = FrameStream(ends[0]), FrameStream(ends[1], LARGE)
    content = random.Random(1).randbytes(3 * 5000 * 4)
    frames = [
        Frame("plain", {"a": [1, None, "é"]}),
        Frame("arrays", {}, (Array(ArrayType("x", "float32", (3, 5000)), content), EMPTY)),
        Frame("last", {"b": 0.5}),
    ]  # fmt: skip
    for frame in frames:
        sender.put(frame)
    got = []
    while len(got) < 3:
        sender.flush()
        arrived = receiver.receive()
        if arrived is not None:
            got.append(arrived)
    assert [(frame.what, frame.fields) for frame in got] == [(frame.what, frame.fields) for frame in frames]
    assert [bytes(array.content) for array in got[1].arrays] == [content, b""]
    assert receiver.receive() is None
    assert sender.sent_bytes == receiver.received_bytes


def test_memory_of_a_body_is_used_again_only_when_nothing_refers_to_it(ends):
    sender, receiver = FrameStream(ends[0]), FrameStream(ends[1], LARGE, BodyBuffers(2))

    def send(value: int) -> tuple[int, Array]:
        sender.put(Frame("x", {}, (Array(ArrayType("x", "uint8", (100,)), bytes([value]) * 100),)))
        sender.flush()
        array = receive(receiver).arrays[0]
        return torch.frombuffer(array.content, dtype=torch.uint8).data_ptr(), array

    first, held = send(1)
    assert send(2)[0] != first, "the first is in use"
    tensor = torch.frombuffer(held.content, dtype=torch.uint8)
    del held
    for value in range(3, 9):
        assert send(value)[0] != first, "a tensor uses it"
    assert bool((tensor == 1).all())
    again = send(9)[0]
    assert send(10)[0] == again


def test_a_frame_may_come_byte_by_byte(ends):
    receiver = FrameStream(ends[1], LARGE)
    line = json.dumps({"what": "w", "fields": {}, "arrays": [["x", "uint8", [3]]]}).encode() + b"\nabc"
    for number, _ in enumerate(line):
        assert receiver.receive() is None
        ends[0].sendall(line[number : number + 1])
    assert bytes(receive(receiver).arrays[0].content) == b"abc"


def test_limits_may_change_between_two_frames_that_came_together(ends):
    receiver = FrameStream(ends[1], Limits(100, 0))
    ends[0].sendall(b'{"what":"a","fields":{}}\n{"what":"b","fields":{},"arrays":[["x","uint8",[2]]]}\nhi')
    assert receive(receiver).what == "a"
    receiver.limits = Limits(100, 2)
    assert bytes(receive(receiver).arrays[0].content) == b"hi"


@pytest.mark.parametrize(
    "line",
    [
        b"x" * 5000, b"\n", b"[]\n", b"{}\n", b'{"what":1,"fields":{}}\n', b'{"what":"a","fields":[]}\n',
        b'{"what":"a","fields":{},"more":1}\n', b'{"what":"a","fields":{},"arrays":[["x","uint8",[1]]]}\n',
        b'{"what":"a","fields":{},"arrays":[["x","object",[0]]]}\n',
        b'{"what":"a","fields":{},"arrays":[["x","uint8",[-1]]]}\n',
        b'{"what":"a","fields":{},"arrays":[["x","uint8",[true]]]}\n', b'{"what":"a","fields":{},"arrays":7}\n',
        b'{"what":"a","fields":{},"arrays":[["x","float64",[1099511627776,1099511627776]]]}\n',
        b"[" * 4000 + b"\n", b"\xff\xfe\n",
        b'{"what":"a","fields":{},"arrays":[' + b'["x","uint8",[0]],' * 65 + b"]}\n",
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused_before_memory_is_taken(ends, line):
    receiver = FrameStream(ends[1], Limits(4096, 0))
    ends[0].sendall(line)
    with pytest.raises(ProtocolError):
        receive(receiver)


def test_a_connection_that_ends_is_told(ends):
    receiver = FrameStream(ends[1])
    ends[0].close()
    with pytest.raises(EOFError):
        receiver.receive()


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
        say.decode(receive(receiver), say.FROM_STUDENT)


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


# --- the conversation ---


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
