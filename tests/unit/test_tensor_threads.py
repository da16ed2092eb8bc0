"""A process that ends while a thread of ours is inside torch.

Each test has a process of its own, forked from one that has imported torch and nothing of this package.

Until Python 3.14 a thread that comes back from torch's C++ then, and wants Python's lock, aborts the process.
"""

from __future__ import annotations

import sys

import prepared
import pytest

COPYING = """
import sys, threading, time
import torch

def copy_for_a_moment():
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        torch.zeros(100).cpu().contiguous()
"""
OURS = """
from edl_hvd.tensor_threads import TensorThread

TensorThread(copy_for_a_moment, "copying").start()
"""
STUCK = """
TensorThread(threading.Event().wait, "stuck").start()
"""

# A member with 20,000 tensors, most of whose sending is spent inside torch.
TRAINING = """
import queue, socket, sys, threading, time
import torch
import edl_hvd
from edl_hvd.worker import process
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.standby.replica import StandbyReplica
from edl_hvd.worker.standby.donor import StateDonor

edl_hvd.init()
process.current().joined = SoloRendezvous().join(-1, -1, dict)

def worker():
    model = torch.nn.ParameterList(torch.zeros(10) for _ in range(20_000))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    store = edl_hvd.State(model=model, optimizer=optimizer)._runtime.store
    store.save(0)
    return store

donor = StateDonor(worker())
port = donor.serve("127.0.0.1", "secret")
"""
MEMBER = """
newcomer = socket.create_connection(("127.0.0.1", port))
newcomer.sendall(b"secret\\n")
while not any(stream.connected for stream in donor.streams):
    time.sleep(0.001)
donor.commit()
newcomer.recv(1000)
threading.Thread(target=lambda: [None for _ in iter(lambda: newcomer.recv(1000), b"")], daemon=True).start()
donor.abandon()
"""
NEWCOMER = """
work = queue.SimpleQueue()
replica = StandbyReplica(worker(), "127.0.0.1", port, "secret", work.put)
while not any(stream.connected for stream in donor.streams):
    time.sleep(0.001)
donor.commit()
while replica._connection is None:
    time.sleep(0.001)
time.sleep({pause_s})
replica.abandon()
donor.abandon()
"""


def run(*parts: str) -> tuple[int, str]:
    """The exit code, and all that was written."""
    return prepared.run_code("".join(parts), "torch")


def assert_ended_well(done: tuple[int, str]) -> None:
    assert done == (0, "")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python lets such a thread wait for ever")
def test_an_ordinary_thread_inside_torch_aborts_the_process_that_ends():
    ordinary = "threading.Thread(target=copy_for_a_moment, daemon=True).start()\n"
    assert "terminate called" in run(COPYING, ordinary)[1]


def test_the_end_of_the_process_waits_for_a_thread_inside_torch():
    assert_ended_well(run(COPYING, OURS))


def test_it_does_not_wait_for_ever():
    assert_ended_well(run(COPYING, OURS, STUCK))


def test_it_waits_for_as_long_as_a_thread_computes():
    """On a busy machine the last tensor takes long."""
    assert_ended_well(run(COPYING.replace("+ 0.5", "+ 4.0"), OURS))


def test_it_waits_when_the_script_exits_and_reports_the_exit_code():
    assert run(COPYING, OURS, "sys.exit(75)\n")[0] == 75


def test_a_member_ends_while_a_newcomer_takes_its_state_over():
    assert_ended_well(run(TRAINING, MEMBER))


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_a_newcomer_is_sent_home_while_it_takes_the_state_over(pause_s):
    assert_ended_well(run(TRAINING, NEWCOMER.format(pause_s=pause_s)))
