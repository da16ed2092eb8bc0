"""What becomes of a worker's data-loading processes when it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from waiting import soon

from edl_hvd.worker.engine.children import close_on_fork, open_sockets

# A worker that has formed a world and forked a loading process, which waits as if for its next order.
WORKER = """
    import multiprocessing, signal
    from edl_hvd.worker.engine.children import close_on_fork, open_sockets

    def load(ready):
        ready.set()
        signal.pause()

    close_on_fork(open_sockets())
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    context.Process(target=load, args=(ready,)).start()
    ready.wait()
    print("forked", flush=True)
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(PR_SET_PDEATHSIG) is Linux's")
def test_loading_processes_die_with_their_worker_and_let_go_of_its_output():
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"forked\n"
        worker.send_signal(signal.SIGKILL)
        # The end of the output comes when its last holder is gone: stock horovodrun waits for just that.
        assert worker.communicate(timeout=60) == (b"", None)


def test_a_forked_child_does_not_hold_the_connection_open():
    before = open_sockets()
    ours, theirs = socket.socketpair()
    close_on_fork(frozenset(entry for entry in open_sockets() - before if entry[0] == ours.fileno()))
    reader, writer = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=os.read, args=(reader, 1))  # lives until told
    child.start()
    try:
        with theirs:
            ours.close()
            theirs.settimeout(60)
            assert theirs.recv(1) == b""
    finally:
        close_on_fork(frozenset())
        os.write(writer, b"x")
        soon(child)
        os.close(reader)
        os.close(writer)
