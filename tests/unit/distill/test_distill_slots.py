"""Large bodies pass through shared memory between processes of one host, and nothing is lost where they cannot."""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import json
import os
import random
import signal
import socket
from pathlib import Path

import pytest
import torch
from fleet import fleet
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd import body_slots
from edl_hvd.body_slots import LEAST_BYTES, SlotWriter
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits

pytestmark = pytest.mark.distill

LARGE = Limits(1 << 16, 1 << 24)
BODY = 2 * LEAST_BYTES


@pytest.fixture
def ends():
    """A stream that writes slots, and one that reads them."""
    one, other = socket.socketpair(socket.AF_UNIX)
    sender, receiver = FrameStream(one, LARGE), FrameStream(other, LARGE)
    sender.write_slots(SlotWriter())
    receiver.read_slots()
    yield sender, receiver
    sender.close()
    receiver.close()


def frame_of(content: bytes, name: str = "give") -> Frame:
    return Frame(name, {}, (Array(ArrayType("x", "uint8", (len(content),)), content),))


def exchange(sender: FrameStream, receiver: FrameStream, count: int) -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        sender.flush()
        arrived = receiver.receive()
        if arrived is not None:
            got.append(bytes(arrived.arrays[0].content) if arrived.arrays else b"")
    return got


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_large_body_passes_no_socket(ends):
    sender, receiver = ends
    for number in range(20):
        content = random.Random(number).randbytes(BODY + 1000 * (number % 7))
        sender.put(frame_of(content))
        assert exchange(sender, receiver, 1) == [content]
    assert receiver.received_bytes == sender.sent_bytes < 20 * 200


def test_a_body_that_is_not_read_yet_does_not_hold_up_the_next_one(ends):
    sender, receiver = ends
    contents = [random.Random(number).randbytes(BODY) for number in range(5)]
    for content in contents:
        sender.put(frame_of(content))
    assert exchange(sender, receiver, 5) == contents
    assert 4 * BODY < sender.sent_bytes < 4 * BODY + 1000


def test_small_and_large_bodies_of_any_order_arrive_as_they_were(ends):
    """Files come with the first byte of a line only, as what reads a body would lose them."""
    sender, receiver = ends
    sender.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    chance = random.Random(3)
    for _ in range(60):
        sizes = [chance.choice((1, 5000, LEAST_BYTES - 1, BODY, chance.randrange(BODY, 4 * BODY))) for _ in range(4)]
        contents = [chance.randbytes(size) for size in sizes]
        for content in contents:
            sender.put(frame_of(content))
        assert exchange(sender, receiver, 4) == contents


def test_one_slot_serves_all_streams_and_who_does_not_read_is_left_behind(monkeypatch):
    writer, pairs = SlotWriter(), [socket.socketpair(socket.AF_UNIX) for _ in range(3)]
    senders = [FrameStream(one, LARGE) for one, _ in pairs]
    receivers = [FrameStream(other, LARGE) for _, other in pairs]
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.write_slots(writer)
        receiver.read_slots()
    content = random.Random(1).randbytes(BODY)
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.put(frame_of(content))
        assert exchange(sender, receiver, 1) == [content]
    assert writer.slot == 1
    senders[0].put(frame_of(content))
    senders[0].flush()  # its reader is stopped
    other = random.Random(2).randbytes(BODY)
    senders[1].put(frame_of(other))
    assert exchange(senders[1], receivers[1], 1) == [other]
    assert writer.slot == 1
    monkeypatch.setattr(body_slots, "_ABANDON_S", 0.0)
    senders[1].put(frame_of(other))
    assert exchange(senders[1], receivers[1], 1) == [other]
    assert writer.slot == 2
    assert exchange(senders[0], receivers[0], 1) == [content]
    for stream in (*senders, *receivers):
        stream.close()
    writer.close()


def test_without_another_file_bodies_pass_the_socket(ends, monkeypatch):
    sender, receiver = ends
    contents = [random.Random(number).randbytes(BODY) for number in range(3)]

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "dup", refuse)
    for content in contents:
        sender.put(frame_of(content))
    assert exchange(sender, receiver, 3) == contents
    assert sender.sent_bytes > 3 * BODY


def test_no_file_stays_open(ends):
    before = open_files()
    for number in range(50):
        one, other = socket.socketpair(socket.AF_UNIX)
        writer, sender, receiver = SlotWriter(), FrameStream(one, LARGE), FrameStream(other, LARGE)
        sender.write_slots(writer)
        receiver.read_slots()
        sender.put(frame_of(bytes(BODY)))
        if number % 3:
            sender.flush()
        if number % 3 == 2:
            receiver.receive()
        for end in (sender, receiver, writer):
            end.close()
    del one, other, writer, sender, receiver, end
    assert open_files() == before


def line_of(slot: object, size: int = BODY) -> bytes:
    header = {"what": "give", "fields": {}, "arrays": [["x", "uint8", [size]]], "slot": slot}
    return json.dumps(header).encode() + b"\n"


def memory_file(size: int, seals: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def send_with(connection: socket.socket, line: bytes, files: list[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([line], ancillary)


@pytest.mark.parametrize(
    ("slot", "make", "words"),
    [
        ([1, 1], list, "did not come"),
        ([1, 0], list, "did not come"),
        ([1, 1], lambda: [memory_file(BODY)], "did not come"),
        ([1, 1], lambda: [memory_file(4 * BODY, seals=False)], "may shrink"),
        ([1, 1], lambda: [os.open("/dev/null", os.O_RDWR)], "no shared memory"),
        ([1, 1], lambda: [os.open("/etc/hostname", os.O_RDONLY)], "no shared memory"),
        ([-1, 0], list, "no place in shared memory"),
        ([1, 2], list, "no place in shared memory"),
        ("here", list, "no header"),
        ([1, 1, 1], list, "no header"),
    ],
)
def test_what_is_no_slot_is_refused(ends, slot, make, words):
    sender, receiver = ends
    before, files = open_files(), make()
    send_with(sender.connection, line_of(slot), files)
    for fd in files:
        os.close(fd)
    with pytest.raises(ProtocolError, match=words):
        receiver.receive()
    receiver.close()
    assert open_files() == before - 1


def test_files_that_no_message_uses_are_refused(ends):
    sender, receiver = ends
    before = open_files()
    for _ in range(6):
        fd = memory_file(BODY)
        send_with(sender.connection, b'{"what": "x", "fields": {}}\n', [fd])
        os.close(fd)
    with pytest.raises(ProtocolError, match="more than 4 files"):
        exchange(sender, receiver, 6)
    assert open_files() == before


def test_a_slot_that_was_not_agreed_on_is_refused():
    one, other = socket.socketpair(socket.AF_UNIX)
    fd = memory_file(4 * BODY)
    send_with(one, line_of([1, 1]), [fd])
    os.close(fd)
    stream = FrameStream(other, LARGE)
    with pytest.raises(ProtocolError, match="expected it to follow"):
        stream.receive()
    stream.close()
    one.close()


class First:
    """A teacher that changes its input where it lies, and answers what it was."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        answer = images.flatten(1)[:, :4].double().sum(1, keepdim=True)
        images.zero_()
        return answer


def test_a_teacher_of_this_host_gets_its_tasks_through_shared_memory(tmp_path):
    samples = torch.randn(96, 64, 256, generator=torch.Generator().manual_seed(1))
    batches = edl_hvd.ElasticBatchSampler(96, global_batch=8, micro_batch=8)
    with fleet(tmp_path, First(), First()) as teachers:
        inner = DataLoader(TensorDataset(samples, torch.arange(96)), batch_sampler=batches)
        loader = DistillLoader(inner, Teachers(teachers.source, port=teachers.port), send=lambda batch: batch[0])
        seen = 0
        for number, (images, index, answer) in enumerate(loader):
            assert torch.equal(images, samples[index])
            assert torch.equal(answer, images.flatten(1)[:, :4].double().sum(1, keepdim=True))
            seen += len(index)
            if number == 3:  # on a busy machine one of the two may have answered everything
                maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in teachers.processes.values()]
                teachers.signal(1, signal.SIGKILL)
        loader.close()
    assert seen == 96
    assert "memfd:edl_hvd-body" in "".join(maps)
    assert "memfd:edl_hvd-body" not in Path("/proc/self/maps").read_text()
