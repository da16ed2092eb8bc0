"""What a megabyte costs on the way to a teacher and back, in processor time of both ends, beside plain sockets.

    python benchmarks/distill_wire.py       TCP and Unix sockets, plain and with this package's messages; and gRPC,
                                            where grpcio is installed

A micro-batch of 64 images of 3 × 224 × 224 bytes goes to a process that reads it, and 64 × 1000 float16 come back, one
after the other over the loopback interface. The cost is the difference between 45 and 5 of these, so that set-up does
not count; the median of five rounds, in which all ways take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import resource
import select
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.body_slots import SlotWriter
from edl_hvd.distill import same_host
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits

SEND = ArrayType("images", "uint8", (64, 3, 224, 224))
ANSWER = ArrayType("logits", "float16", (64, 1000))
MEGABYTES = (SEND.size_bytes + ANSWER.size_bytes) / 1e6


def fill(connection: socket.socket, view: memoryview) -> None:
    """Read until a buffer is full."""
    while len(view):
        view = view[connection.recv_into(view) :]


class Plain:
    """Blocking sockets that read into buffers that exist."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.images, self.logits = memoryview(bytearray(SEND.size_bytes)), memoryview(bytearray(ANSWER.size_bytes))

    def ask(self) -> None:
        self.connection.sendall(self.images)
        fill(self.connection, self.logits)

    def answer(self) -> None:
        fill(self.connection, self.images)
        self.connection.sendall(self.logits)


class Framed:
    """The package's messages over sockets that do not block."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family == socket.AF_UNIX:
            same_host.widen(connection)
        self.stream = FrameStream(connection, Limits(1 << 16, SEND.size_bytes), BodyBuffers(4))
        if connection.family == socket.AF_UNIX:
            self.stream.write_slots(SlotWriter())
            self.stream.read_slots()
        self.give = Frame("give", {"number": 1}, (Array(SEND, bytearray(SEND.size_bytes)),))
        self.reply = Frame("answer", {"number": 1}, (Array(ANSWER, bytearray(ANSWER.size_bytes)),))

    def ask(self) -> None:
        self._send(self.give)
        self._receive()

    def answer(self) -> None:
        self._receive()
        self._send(self.reply)

    def _send(self, frame: Frame) -> None:
        self.stream.put(frame)
        while not self.stream.flush():
            select.select([], [self.stream.connection], [])

    def _receive(self) -> Frame:
        while (frame := self.stream.receive()) is None:
            select.select([self.stream.connection], [], [])
        return frame


def pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    if family == socket.AF_UNIX:
        return socket.socketpair(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


WAYS: dict[str, tuple[Callable[[socket.socket], Any], socket.AddressFamily]] = {
    "TCP, plain": (Plain, socket.AF_INET),
    "TCP, messages": (Framed, socket.AF_INET),
    "Unix, plain": (Plain, socket.AF_UNIX),
    "Unix, messages": (Framed, socket.AF_UNIX),
}
GRPC = "gRPC, bytes"
_METHOD, _ANY_SIZE = "/teacher/answer", [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class WireGoal:
    """What a way may cost at most, as a part of another one."""

    name: str
    way: str
    other: str
    most: float


GOALS = (
    WireGoal("processor time of a megabyte over TCP, of plain sockets", "TCP, messages", "TCP, plain", 1.25),
    WireGoal("the same, of gRPC", "TCP, messages", GRPC, 1 / 3),
    WireGoal("over a Unix socket, of TCP", "Unix, messages", "TCP, messages", 0.5),
)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(kind: Callable[[socket.socket], Any], there: socket.socket, count: int, results: Any) -> None:
    """The teacher's end."""
    side, began_s = kind(there), cpu_s()
    for _ in range(count):
        side.answer()
    results.put(cpu_s() - began_s)


def cost_s(way: str, count: int) -> float:
    """Processor seconds of both ends for a number of round trips."""
    kind, family = WAYS[way]
    here, there = pair(family)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    other = context.Process(target=serve, args=(kind, there, count, results))
    other.start()
    there.close()
    side, began_s = kind(here), cpu_s()
    for _ in range(count):
        side.ask()
    own_s = cpu_s() - began_s
    total_s = own_s + float(results.get(timeout=300))
    other.join(300)
    here.close()
    return total_s


def serve_grpc(pipe: Any) -> None:
    """The teacher's end of gRPC: bytes in and out, so that nothing is spent on protobuf."""
    import grpc

    logits = bytes(ANSWER.size_bytes)

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda images, context: logits)

    server = grpc.server(ThreadPoolExecutor(1), handlers=(Handler(),), options=_ANY_SIZE)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    pipe.recv()
    began_s = cpu_s()
    pipe.send(None)
    pipe.recv()
    pipe.send(cpu_s() - began_s)
    server.stop(None)


def grpc_cost_s(count: int) -> float:
    """As ``cost_s``, by gRPC."""
    import grpc

    # gRPC has threads of its own, so its process is not a fork of this one.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=serve_grpc, args=(there,))
    other.start()
    images = bytes(SEND.size_bytes)
    with grpc.insecure_channel(f"127.0.0.1:{here.recv()}", options=_ANY_SIZE) as channel:
        ask = channel.unary_unary(_METHOD)
        here.send(None)
        here.recv()
        began_s = cpu_s()
        for _ in range(count):
            assert len(ask(images)) == ANSWER.size_bytes
        own_s = cpu_s() - began_s
    here.send(None)
    total_s = own_s + float(here.recv())
    other.join(300)
    return total_s


def measure(rounds: int) -> dict[str, list[float]]:
    """Processor milliseconds for a megabyte, of each round, by way; gRPC only where grpcio is installed."""
    ways: dict[str, Callable[[int], float]] = {way: lambda count, way=way: cost_s(way, count) for way in WAYS}
    if importlib.util.find_spec("grpc"):
        ways[GRPC] = grpc_cost_s
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, cost in ways.items():
            found[way].append((cost(45) - cost(5)) / (40 * MEGABYTES) * 1000)
    return found


def goal_lines(found: Mapping[str, Sequence[float]]) -> list[str]:
    """The rows of a table of the goals, with a verdict for medians."""
    lines = []
    for goal in GOALS:
        if goal.other not in found:
            lines.append(f"| {goal.name} | at most {goal.most:.2f} | not measured: install grpcio | | |")
            continue
        parts = [one / other for one, other in zip(found[goal.way], found[goal.other], strict=True)]
        middle = statistics.median(parts)
        verdict = "kept" if middle <= goal.most else "missed"
        lines.append(
            f"| {goal.name} | at most {goal.most:.2f} | {middle:.2f} ({verdict}) "
            f"| {min(parts):.2f} to {max(parts):.2f} | |"
        )
    return lines


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    plain = statistics.median(found["TCP, plain"])
    print("| way | processor ms per MB | range | of plain TCP |\n|---|---|---|---|")
    for way, costs in found.items():
        middle = statistics.median(costs)
        print(f"| {way} | {middle:.3f} | {min(costs):.3f} to {max(costs):.3f} | {middle / plain:.2f} |")
    print("\n| goal | | measured, median | range | |\n|---|---|---|---|---|")
    print("\n".join(goal_lines(found)))
    print(f"\n{arguments.rounds} rounds; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
