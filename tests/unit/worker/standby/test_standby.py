"""A member sends its state to a standby while it trains on: both ends, over a real connection, in one process."""

import gc
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from fake_world import alone
from torch import nn
from waiting import soon

import edl_hvd
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.standby import donor, messages, replica
from edl_hvd.worker.standby.donor import StateDonor
from edl_hvd.worker.standby.messages import LIMITS, StateMessage
from edl_hvd.worker.standby.replica import StandbyReplica

SECRET = "only the job knows"


class Worker:
    """A model with all that a state may hold: followed, still and changing tensors."""

    def __init__(self, optimizer: str = "sgd", seed: int = 0, width: int = 0) -> None:
        torch.manual_seed(seed)
        wide = (nn.Linear(144, width), nn.Linear(width, 144)) if width else ()
        self.model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.1), *wide, nn.Linear(144, 2)
        ).to(memory_format=torch.channels_last)
        self.frozen = nn.Embedding(10_000, 8).requires_grad_(False)
        parameters = self.model.parameters()
        made = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
            "adamax": lambda: torch.optim.Adamax(parameters, lr=0.01, foreach=False),
        }[optimizer]()
        self.optimizer = edl_hvd.DistributedOptimizer(made, self.model.named_parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = edl_hvd.State(
            model=self.model, frozen=self.frozen, optimizer=self.optimizer, scheduler=self.scheduler, notes=[],
            average=torch.zeros(2), chance=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        self.store = self.state._runtime.store

    def step(self, light: bool = False) -> None:
        """One step and its commit, as ``state.batches`` and a script make them."""
        self.optimizer.zero_grad()
        out = self.model(torch.randn(4, 3, 8, 8))
        out.square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.notes.append(self.store.step)
        self.state.average.mul_(0.9).add_(out.detach().mean(0))
        torch.rand(3, generator=self.state.chance)
        self.store.step += 1
        self.store.save(self.store.commit + 1, light=light)

    def everything(self) -> tuple[object, dict[str, torch.Tensor]]:
        plain, tensors = self.store.live(self.store.commit)
        return plain, {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
def pair(request):
    """A member that has trained a little, and a standby with other weights."""
    optimizer = getattr(request, "param", "sgd")
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        member, standby = Worker(optimizer), Worker(optimizer, seed=1)
        member.store.save(0)
        member.step()
        yield member, standby


class Transfer:
    """Both ends of one transfer."""

    def __init__(self, member: Worker, standby: Worker, secret: str = SECRET, donor: StateDonor | None = None) -> None:
        self.member = member
        self.donor = donor or StateDonor(member.store)
        self.arrived: queue.SimpleQueue[StandbyReplica] = queue.SimpleQueue()
        port = self.donor.serve("127.0.0.1", SECRET)
        self.replica = StandbyReplica(standby.store, "127.0.0.1", port, secret, self.arrived.put)

    def train(self, light: bool = False) -> None:
        self.member.step(light)
        self.donor.commit()

    def train_until_caught_up(self) -> None:
        """The member takes what steps it takes; the standby applies them, in between."""
        while not self.replica.caught_up:
            self.train()
            while not self.arrived.empty():
                soon(self.arrived).apply_next()
            time.sleep(0)  # lets the threads run

    def finish(self) -> None:
        while not self.replica.closed:
            soon(self.arrived).apply_next()


def assert_equal(one: Worker, other: Worker) -> None:
    plain, tensors = one.everything()
    other_plain, other_tensors = other.everything()
    assert plain == other_plain
    assert tensors.keys() == other_tensors.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], other_tensors[name])]
    assert different == []


@pytest.mark.parametrize("pair", ["sgd", "adamw", "adamax"], indirect=True)
def test_a_standby_holds_the_very_state_of_the_member_that_trained_on_meanwhile(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for _ in range(5):
        transfer.train()
    transfer.donor.end()
    transfer.finish()
    assert transfer.replica.synced
    assert standby.store.held == member.store.held > 5
    assert_equal(member, standby)
    assert standby.store.fingerprint() == member.store.fingerprint()
    # What it holds is also what it would come back to.
    with torch.no_grad():
        standby.model[0].weight.zero_()
    standby.store.restore()
    assert_equal(member, standby)


def weights_of(worker: Worker) -> set[str]:
    names = worker.store.live(0).tensors
    weights = {name for name in names if name.startswith("model/") and "weight" in name}
    assert weights
    return weights


def test_a_buffer_that_grows_while_a_standby_takes_the_state_over_arrives_as_it_is(pair):
    member, standby = pair
    for worker in pair:
        worker.frozen.register_buffer("bank", torch.zeros(1, 3))
        worker.frozen.register_buffer("later", None)
        kept = {"notes": [], "average": torch.zeros(2), "chance": worker.state.chance, "scheduler": worker.scheduler}
        worker.state = edl_hvd.State(model=worker.model, frozen=worker.frozen, optimizer=worker.optimizer, **kept)
        worker.store = worker.state._runtime.store
    member.store.save(0)
    member.step()
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for number in range(3):
        member.frozen.bank = torch.cat([member.frozen.bank, torch.full((1, 3), 1.0 + number)])
        member.frozen.later = torch.ones(number + 1)
        transfer.train()
    transfer.donor.end()
    transfer.finish()
    assert transfer.replica.synced
    assert standby.frozen.bank.shape == (4, 3)
    assert_equal(member, standby)
    standby.frozen.bank = torch.zeros(1, 3)
    standby.store.restore()
    assert_equal(member, standby)


def test_a_worker_that_was_a_standby_copies_no_weights_in_its_commits(pair):
    """Each step that it had applied looked like a change by the script, and doubled the commits that copy all."""
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for _ in range(20):
        transfer.train()
    transfer.donor.end()
    transfer.finish()
    for _ in range(4):
        standby.step(light=True)
    assert weights_of(standby).isdisjoint(standby.store._last.state.tensors)


def test_a_standby_copies_no_weights_where_the_member_that_sends_them_copies_none(pair):
    """The other members wait while it copies: its first commit takes as long for 1 GB of weights as for 10 MB."""
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for _ in range(4):
        transfer.train(light=True)
    transfer.donor.end()
    transfer.finish()
    assert weights_of(standby).isdisjoint(standby.store._last.state.tensors)
    assert_equal(member, standby)
    # It can come back to that commit: after its first step, and before.
    for _ in range(2):
        standby.store.restore()
        assert standby.store.held == member.store.held
        counters = standby.store.live(standby.store.commit)[0]["counters"]
        assert (counters["step"], counters["ahead"]) == (member.store.step, standby.store.to_skip)
        standby.optimizer.zero_grad()
        standby.model(torch.ones(4, 3, 8, 8)).square().mean().backward()
        standby.optimizer.step()


def test_weights_that_the_script_of_a_newcomer_moves_are_seen(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for _ in range(4):
        transfer.train(light=True)
    transfer.donor.end()
    transfer.finish()
    with torch.no_grad():
        standby.model[4].bias[0] += 1
    standby.store.restore()
    assert standby.store.freshness.is_dirty
    assert not member.store.freshness.is_dirty


def test_what_is_sent_at_the_end_does_not_grow_with_what_no_step_moves(pair, monkeypatch):
    member, standby = pair
    sent = []
    monkeypatch.setattr(donor, "to_frame", lambda message: (sent.append(message), messages.encode(message))[1])
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    transfer.donor.end()
    transfer.finish()
    [state] = [message for message in sent if message.what == "state"]
    [end] = [message for message in sent if message.what == "end"]
    moved = set(end.tensors)
    assert "frozen/weight" in state.tensors
    assert "frozen/weight" not in moved
    assert not any(name.startswith("optimizer") or name.endswith(("0.weight", "4.bias")) for name in moved)
    assert any(name.endswith("running_mean") for name in moved)
    assert end.size_bytes < state.size_bytes / 10


def test_weights_that_the_script_moves_besides_show_in_the_sample(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    member.model[4].weight.data.clamp_(-0.01, 0.01)
    transfer.train()
    transfer.donor.end()
    transfer.finish()
    assert standby.store.is_unverified
    assert standby.store.fingerprint() != member.store.fingerprint()


def test_a_script_that_is_seen_to_move_weights_besides_is_not_transferred(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    transfer.train()
    with torch.no_grad():
        member.model[4].bias[0] += 1
    transfer.donor.commit()
    transfer.finish()
    assert standby.store.held == -1


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_standby_waiting(pair):
    """A data loader's process has a copy of the connection, so to close it here tells the standby nothing."""
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    loaders = os.fork()
    if loaders == 0:
        while True:
            signal.pause()
    try:
        transfer.donor.end()
        transfer.finish()
    finally:
        os.kill(loaders, signal.SIGKILL)
        os.waitpid(loaders, 0)
    assert transfer.replica.synced
    assert_equal(member, standby)


def test_what_a_member_has_sent_whole_is_enough_while_its_connection_stays_open(pair, monkeypatch):
    """As when it is killed then: the system closes the connection once it has freed the memory."""
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    put = donor._Stream.put
    monkeypatch.setattr(donor._Stream, "put", lambda stream, message: message and put(stream, message))
    [stream] = transfer.donor.streams
    transfer.donor.end()
    transfer.finish()
    assert transfer.replica.synced
    assert not stream.closed
    assert_equal(member, standby)
    stream.close()


def on_the_wire(message: StateMessage) -> bytes:
    """A small message as it is sent."""
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as content:
        FrameStream(here).send(messages.encode(message), timeout_s=60)
        here.shutdown(socket.SHUT_WR)
        return content.read()


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_a_standby_whose_donor_is_dead_takes_what_has_arrived_and_waits_for_nothing_more(pair, missing_bytes):
    """The connection of a process that was killed stays open until its memory is freed; a lost host closes none."""
    member, standby = pair
    light = member.store.is_light
    plain, tensors = member.store.live(member.store.commit)
    last_word = on_the_wire(StateMessage("end", [plain, light], {"average": member.state.average}))
    arrived: queue.SimpleQueue[StandbyReplica] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        replica = StandbyReplica(standby.store, "127.0.0.1", listener.getsockname()[1], SECRET, arrived.put)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # all that is sent is there at once
    with connection, connection.makefile("rb") as secret:
        secret.readline()
        FrameStream(connection).send(messages.encode(StateMessage("state", [plain, light], tensors)), timeout_s=60)
        soon(arrived).apply_next()
        connection.sendall(last_word[: len(last_word) - missing_bytes])
        replica.end_input()
        while not replica.closed:
            soon(arrived, timeout_s=60).apply_next()
    assert replica.synced == (missing_bytes == 0)
    assert standby.store.held == (member.store.held if replica.synced else -1)


def test_a_donor_that_dies_before_it_is_reached_is_not_waited_for(pair, monkeypatch):
    """As that of a lost host, which answers nothing for as long as a connection may take."""
    _, standby = pair
    over = threading.Event()

    def connect(*_, **__):
        soon(over)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    arrived: queue.SimpleQueue[StandbyReplica] = queue.SimpleQueue()
    replica = StandbyReplica(standby.store, "127.0.0.1", 1, SECRET, arrived.put)
    replica.end_input()
    assert replica.closed
    assert standby.store.held == -1
    over.set()
    soon(arrived)


FAULTS = """
import ctypes, resource, sys
from edl_hvd.worker.standby import replica

kept = replica._keep_freed_memory() if sys.argv[1] == "kept" else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def faults(size=64 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(ctypes.c_void_p(block), 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


found = [faults(), faults(), faults()]
if kept:
    replica._return_freed_memory()
    found += [faults(), faults()]
print(int(kept), *(count > 1000 for count in found))
"""


@pytest.mark.parametrize(
    ("kind", "variables", "expected"),
    [
        ("usual", {}, "0 True True True"),
        ("kept", {}, "1 True False False True True"),
        ("kept", {"MALLOC_MMAP_THRESHOLD_": "1000000"}, "0 True True True"),
    ],
    ids=["usual", "kept", "tuned"],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_a_standby_keeps_freed_memory_until_it_has_joined(kind, variables, expected):
    """In a process of its own: pages that are new to it are counted."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, kind], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == expected


def test_a_standby_gives_the_memory_back_after_its_first_own_step(pair, monkeypatch):
    returned = threading.Event()
    monkeypatch.setattr(replica, "_return_freed_memory", returned.set)
    monkeypatch.setattr(replica, "_keep_freed_memory", lambda: True)
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    transfer.donor.end()
    transfer.finish()
    assert not returned.is_set(), "the world is yet to form"
    standby.step()
    soon(returned)


def test_a_world_that_breaks_leaves_the_standby_with_nothing(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    transfer.donor.abandon()
    transfer.finish()
    assert not transfer.replica.synced
    assert standby.store.held == -1


def test_the_last_commit_survives_being_transferred(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    plain, tensors = member.everything()
    with torch.no_grad():
        member.model[0].weight.zero_()
    member.store.restore()
    assert member.everything()[0] == plain
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in member.everything()[1].items())


def test_an_optimizer_that_computes_its_own_gradients_is_not_transferred(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    member.optimizer.step(lambda: torch.tensor(0.0))
    transfer.finish()
    assert not transfer.replica.synced


@pytest.mark.parametrize("write", ["zero_grad", "data"])
def test_a_gradient_that_is_written_to_while_it_is_sent_goes_to_no_standby(pair, write):
    """The donor does not copy gradients; what it sends must be what its optimizer got, or the transfer ends."""
    # Gradients that do not fit into the buffers of a connection.
    member, standby = Worker("adamw", width=20_000), Worker("adamw", seed=1, width=20_000)
    member.store.save(0)
    transfer = Transfer(member, standby)
    transfer.train_until_caught_up()
    for _ in range(6):
        transfer.train()  # the standby applies nothing, and reads four messages ahead
    if write == "zero_grad":
        member.optimizer.zero_grad(set_to_none=False)
    else:
        for parameter in member.model.parameters():
            parameter.grad.data.zero_()
    transfer.train()
    transfer.donor.end()
    transfer.finish()
    assert not transfer.replica.synced
    assert standby.store.held == -1
    again = Transfer(member, standby, donor=transfer.donor)
    again.train_until_caught_up()
    for _ in range(6):
        again.train()
        for parameter in member.model.parameters():
            parameter.grad.data.zero_()
    again.donor.end()
    again.finish()
    assert again.replica.synced
    assert_equal(member, standby)


def test_a_standby_that_cannot_keep_up_is_let_go(pair, monkeypatch):
    monkeypatch.setattr(donor, "_LEAST_QUEUE_BYTES", 1)
    member, standby = pair
    transfer = Transfer(member, standby)
    while transfer.donor.streams:  # nobody works: what was read waits, what was sent fills the sockets
        transfer.train()
    transfer.finish()
    assert standby.store.held == -1


def test_who_does_not_know_the_secret_gets_nothing_and_stops_nobody(pair):
    member, standby = pair
    transfer = Transfer(member, standby)
    port = StateDonor(member.store).serve("127.0.0.1", SECRET)
    for words in (b"", b"wrong\n", b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            try:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except OSError:
                pass  # hung up while it still talked
    transfer.train_until_caught_up()


def test_a_donor_whose_call_is_over_is_freed_while_the_optimizer_lives(pair):
    member, standby = pair
    others = set(threading.enumerate())
    transfer = Transfer(member, standby)
    [sending] = [thread for thread in set(threading.enumerate()) - others if thread.name == "edl-donor"]
    transfer.train_until_caught_up()
    transfer.donor.end()
    transfer.finish()
    soon(sending)
    donor = weakref.ref(transfer.donor)
    transfer.donor = None
    gc.collect()
    assert donor() is None
    member.step()


def test_a_silent_stranger_that_connects_first_does_not_keep_the_standby_out(pair, monkeypatch):
    member, standby = pair
    create_server = socket.create_server
    strangers = []

    def create_visited_server(address):
        listener = create_server(address)
        strangers.append(socket.create_connection(listener.getsockname()))
        return listener

    monkeypatch.setattr(socket, "create_server", create_visited_server)
    transfer = Transfer(member, standby)
    while not (transfer.replica.caught_up or transfer.replica.closed):
        transfer.train()
        while not transfer.arrived.empty():
            soon(transfer.arrived).apply_next()
        time.sleep(0)  # lets the threads run
    transfer.donor.end()
    transfer.finish()
    strangers.pop().close()
    assert transfer.replica.synced


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.arange(5_000_000.0),
    ],
)
def test_a_tensor_arrives_as_it_was(tensor):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = messages.encode(StateMessage("x", {"a": [1, None]}, {"t": tensor, "u": tensor}))
        sender = threading.Thread(target=FrameStream(ours).send, args=(frame, 60))
        sender.start()
        arrived = messages.decode(FrameStream(theirs, LIMITS).receive_next(60))
        soon(sender)
    assert (arrived.what, arrived.plain, list(arrived.tensors)) == ("x", {"a": [1, None]}, ["t", "u"])
    for other in arrived.tensors.values():
        assert other.dtype == tensor.dtype
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "types", [None, [], [["float32", [2]]], [["nonsense", [8]]], [["uint8", [1 << 40]]], [["uint8", "x"]], [7]]
)
def test_a_message_that_does_not_fit_its_arrays_is_refused(types):
    frame = Frame(
        "state", {"plain": None, "types": types}, (Array(ArrayType("x", "uint8", (7,)), bytearray(b"1234567")),)
    )
    with pytest.raises(ProtocolError, match="of a donor holds no state"):
        messages.decode(frame)
    with pytest.raises(ProtocolError, match="of a donor holds no state"):
        messages.decode(Frame("state", {"plain": None, "types": [["uint8", [1 << 40]]]},
                              (Array(ArrayType("x", "uint8", (0,)), bytearray()),)))  # fmt: skip
