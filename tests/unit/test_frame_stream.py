"""Frames arrive as they were sent, however they are cut, and what is no frame costs no memory."""

from __future__ import annotations

import json
import random
import socket

import pytest
import torch

from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits

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
